//! A cluster of real processes on loopback.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use baton_client::{Client, ClientOptions, ClusterStatus};
use tempfile::TempDir;

use crate::etcd::EtcdCluster;
use crate::http;
use crate::metrics::Metrics;
use crate::paths;
use crate::ports;
use crate::process::{Process, Signal};
use crate::wait;

/// Loading five models on two cores takes its time.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// What a cluster consists of. `*_config` are lines of TOML for each process of that role.
#[derive(Clone, Debug)]
pub struct Plan {
    /// 0: routers know their nodes by configuration.
    pub etcd: usize,
    pub routers: usize,
    pub prefill: usize,
    pub decode: usize,
    pub router_config: &'static str,
    pub node_config: &'static str,
}

/// Which kind of process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Router,
    Prefill,
    Decode,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Router => "router",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// One of our processes.
#[derive(Debug)]
pub struct Part {
    pub role: Role,
    pub grpc: SocketAddr,
    /// Where a decode node takes KV.
    pub kv: SocketAddr,
    pub http: SocketAddr,
    pub process: Process,
    name: String,
    arguments: Vec<String>,
}

/// All of them.
#[derive(Debug)]
pub struct Cluster {
    pub etcd: Option<EtcdCluster>,
    pub parts: Vec<Part>,
    pub folder: TempDir,
}

impl Cluster {
    /// Starts everything and waits until every router sees every node.
    ///
    /// # Panics
    /// Where that does not happen in time.
    pub async fn start(plan: &Plan) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let etcd = match plan.etcd {
            0 => None,
            size => Some(EtcdCluster::start(size, folder.path()).await),
        };
        let endpoints = etcd.as_ref().map(EtcdCluster::endpoints).unwrap_or_default().join(",");
        let mut cluster = Self { etcd, parts: Vec::new(), folder };
        let mut known = String::new();
        for (role, count) in [(Role::Prefill, plan.prefill), (Role::Decode, plan.decode)] {
            for at in 0..count {
                let grpc = cluster.add(role, at, plan.node_config, &endpoints);
                let role = role.name();
                known.push_str(&format!("[[nodes]]\nrole = \"{role}\"\naddress = \"{grpc}\"\n"));
            }
        }
        let known = if plan.etcd == 0 { known } else { String::new() };
        let config = format!("{}\n{known}", plan.router_config);
        for at in 0..plan.routers {
            cluster.add(Role::Router, at, &config, &endpoints);
        }
        cluster.ready().await;
        cluster
    }

    fn add(&mut self, role: Role, at: usize, config: &str, etcd: &str) -> SocketAddr {
        let name = format!("{}{at}", role.name());
        let file = self.folder.path().join(format!("{name}.toml"));
        std::fs::write(&file, format!("id = \"{name}\"\n{config}\n")).expect("a temporary file");
        let address = || SocketAddr::from(([127, 0, 0, 1], ports::free()));
        let (grpc, http) = (address(), address());
        let mut arguments = vec![
            "--config".to_string(),
            file.display().to_string(),
            format!("--grpc={grpc}"),
            format!("--http={http}"),
        ];
        if !etcd.is_empty() {
            arguments.push(format!("--etcd={etcd}"));
        }
        if role != Role::Router {
            arguments.push(format!("--model={}", paths::model().display()));
            arguments.push("--threads=1".into());
        }
        let kv = address();
        if role == Role::Decode {
            arguments.push(format!("--kv-port={}", kv.port()));
        }
        let process = spawn(role, &name, self.folder.path(), &arguments);
        self.parts.push(Part { role, grpc, kv, http, process, name, arguments });
        grpc
    }

    /// Waits until every router sees every running node.
    ///
    /// # Panics
    /// Where that does not happen in time, or a process has ended.
    pub async fn ready(&mut self) {
        let nodes = self.parts.iter().filter(|part| part.role != Role::Router).count();
        for part in &mut self.parts {
            assert!(part.process.is_running(), "{} has ended", part.name);
        }
        for router in self.of(Role::Router) {
            let client = client(router.grpc);
            wait::until(READY_WITHIN, "a ready cluster", || async {
                let reply = http::get(router.http, "/readyz").await;
                let ready = reply.map_err(|error| error.to_string())?;
                let status = client.status().await.map_err(|error| error.to_string())?;
                let seen = status.nodes.iter().filter(|node| node.state == "ready").count();
                if ready.status == 200 && seen == nodes && status.nodes.len() == nodes {
                    return Ok(());
                }
                Err(format!("{seen} of {nodes} nodes are ready: {}", states(&status)))
            })
            .await;
        }
    }

    /// Processes of one role, in order.
    pub fn of(&self, role: Role) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(move |part| part.role == role)
    }

    /// A process by role and number.
    ///
    /// # Panics
    /// Where there is none.
    pub fn part(&mut self, role: Role, at: usize) -> &mut Part {
        let mut parts = self.parts.iter_mut().filter(|part| part.role == role);
        parts.nth(at).expect("the plan has so many")
    }

    /// A client for each router.
    pub fn clients(&self) -> Vec<Client> {
        self.of(Role::Router).map(|router| client(router.grpc)).collect()
    }

    /// Ends and starts every node, so that no cache is left. Their ends must be clean.
    ///
    /// # Panics
    /// Where one does not end well.
    pub async fn restart_nodes(&mut self) {
        let folder = self.folder.path().to_path_buf();
        let nodes = || self.parts.iter().filter(|part| part.role != Role::Router);
        nodes().for_each(|part| part.process.signal(Signal::Terminate));
        for part in self.parts.iter_mut().filter(|part| part.role != Role::Router) {
            let status = part.process.exit(Duration::from_secs(20)).await;
            assert!(status.success(), "{} ended with {status}", part.name);
            part.process = spawn(part.role, &part.name, &folder, &part.arguments);
        }
        self.ready().await;
    }

    /// Starts a process that has ended.
    pub async fn restart(&mut self, role: Role, at: usize) {
        let folder = self.folder.path().to_path_buf();
        let part = self.part(role, at);
        part.process = spawn(role, &part.name, &folder, &part.arguments);
        self.ready().await;
    }

    /// Waits until no running node holds a block, a grant or a request.
    ///
    /// # Panics
    /// Where something is still held after `within`.
    pub async fn idle(&mut self, within: Duration) {
        let mut addresses = Vec::new();
        for part in self.parts.iter_mut().filter(|part| part.role != Role::Router) {
            if part.process.is_running() {
                addresses.push((part.name.clone(), part.http));
            }
        }
        for (name, address) in addresses {
            idle(&name, address, within).await;
        }
    }

    /// Sum of a metric over all routers.
    ///
    /// # Panics
    /// Where one does not answer.
    pub async fn routers_sum(&self, metric: &str) -> f64 {
        let mut sum = 0.0;
        for router in self.of(Role::Router) {
            let metrics = http::metrics(router.http).await;
            sum += metrics.expect("the router answers").sum(metric);
        }
        sum
    }

    /// # Panics
    /// Where a log tells of a panic.
    pub fn assert_no_panics(&self) {
        for part in &self.parts {
            let log = part.process.log();
            let panic = log.lines().find(|line| line.contains("panicked"));
            assert!(panic.is_none(), "{}: {}", part.name, panic.unwrap_or_default());
        }
    }
}

/// Waits until the node behind this address holds nothing.
///
/// # Panics
/// Where something is still held after `within`.
pub async fn idle(name: &str, http: SocketAddr, within: Duration) {
    wait::until(within, &format!("an idle {name}"), || async {
        let metrics = http::metrics(http).await.map_err(|error| error.to_string())?;
        let held = Metrics::in_use(&metrics);
        if held.is_empty() { Ok(()) } else { Err(held.join(", ")) }
    })
    .await;
}

/// A client that does not try again by itself: tests want to see the first answer.
///
/// # Panics
/// Never: the address is one.
pub fn client(grpc: SocketAddr) -> Client {
    let options = ClientOptions { retries: 0, ..ClientOptions::default() };
    Client::connect(&format!("http://{grpc}"), options).expect("a socket's address is one")
}

fn states(status: &ClusterStatus) -> String {
    let states = status.nodes.iter().map(|node| format!("{} {}", node.id, node.state));
    states.collect::<Vec<_>>().join(", ")
}

fn spawn(role: Role, name: &str, folder: &Path, arguments: &[String]) -> Process {
    let binary = paths::binary(&format!("baton-{}", role.name()));
    let mut command = Command::new(binary);
    // Variables of the caller's shell would change what is tested.
    for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("BATON_")) {
        command.env_remove(key);
    }
    Process::start(name, folder, command.args(arguments).env("NO_COLOR", "1"))
}
