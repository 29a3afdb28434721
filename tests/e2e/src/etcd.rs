//! A real etcd cluster.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use etcd_client::Client;

use crate::ports;
use crate::process::Process;
use crate::wait;

const READY_WITHIN: Duration = Duration::from_secs(30);

/// Members on loopback.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    process: Process,
    command: Vec<String>,
    client: String,
}

impl EtcdCluster {
    /// Starts so many members and waits until they have a leader.
    ///
    /// # Panics
    /// Where they find none.
    pub async fn start(size: usize, folder: &Path) -> Self {
        let addresses: Vec<(String, String)> = (0..size)
            .map(|_| {
                let url = || format!("http://127.0.0.1:{}", ports::free());
                (url(), url())
            })
            .collect();
        let named = addresses.iter().enumerate().map(|(at, (_, peer))| format!("etcd{at}={peer}"));
        let initial = named.collect::<Vec<_>>().join(",");
        let members = addresses.iter().enumerate().map(|(at, (client, peer))| {
            let data = folder.join(format!("etcd{at}")).display().to_string();
            let command = [
                ["--name", &format!("etcd{at}")],
                ["--data-dir", &data],
                ["--listen-client-urls", client],
                ["--advertise-client-urls", client],
                ["--listen-peer-urls", peer],
                ["--initial-advertise-peer-urls", peer],
                ["--initial-cluster", &initial],
                // Disks of build machines are slow; that is no part of these tests.
                ["--heartbeat-interval", "100"],
                ["--election-timeout", "1000"],
            ];
            let command: Vec<String> = command.concat().iter().map(ToString::to_string).collect();
            let process = spawn(&format!("etcd{at}"), folder, &command);
            Member { process, command, client: client.clone() }
        });
        let cluster = Self { members: members.collect() };
        cluster.leader().await;
        cluster
    }

    /// Client addresses of all members.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|member| member.client.clone()).collect()
    }

    /// Which member leads.
    ///
    /// # Panics
    /// Where none leads in time.
    pub async fn leader(&self) -> usize {
        wait::until(READY_WITHIN, "an etcd leader", || async {
            for (at, member) in self.members.iter().enumerate() {
                let Ok(mut client) = Client::connect([&member.client], None).await else {
                    continue;
                };
                let Ok(status) = client.status().await else { continue };
                let own = status.header().map_or(0, etcd_client::ResponseHeader::member_id);
                if own != 0 && own == status.leader() {
                    return Ok(at);
                }
            }
            Err("no member says that it leads".into())
        })
        .await
    }

    /// `kill -9`.
    pub fn kill(&mut self, member: usize) {
        self.members[member].process.kill();
    }

    /// Starts a killed member again, on its data.
    pub async fn restart(&mut self, member: usize, folder: &Path) {
        let name = format!("etcd{member}");
        let killed = &mut self.members[member];
        killed.process = spawn(&name, folder, &killed.command);
        self.leader().await;
    }
}

fn spawn(name: &str, folder: &Path, arguments: &[String]) -> Process {
    Process::start(name, folder, Command::new("etcd").args(arguments))
}
