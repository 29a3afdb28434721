//! A network that can be cut: a network namespace, joined to the machine's own by a pair of
//! virtual Ethernet devices. Needs root and iproute2.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

/// A namespace and the link to it. Dropped, both go.
#[derive(Debug)]
pub struct CutNetwork {
    name: String,
    device: String,
}

impl CutNetwork {
    /// Addresses of the two ends; tests of one machine that use them run one after the other.
    pub const HERE: Ipv4Addr = Ipv4Addr::new(10, 213, 77, 1);
    pub const THERE: Ipv4Addr = Ipv4Addr::new(10, 213, 77, 2);

    /// # Panics
    /// Where the system refuses.
    pub fn new() -> Self {
        let id = std::process::id();
        let network = Self { name: format!("baton{id}"), device: format!("bt{id}") };
        let (name, device) = (&network.name, &network.device);
        let there = format!("{device}n");
        let (here_address, there_address) =
            (format!("{}/30", Self::HERE), format!("{}/30", Self::THERE));
        ip(&["netns", "add", name]);
        ip(&["link", "add", device, "type", "veth", "peer", "name", &there, "netns", name]);
        ip(&["addr", "add", &here_address, "dev", device]);
        ip(&["-n", name, "addr", "add", &there_address, "dev", &there]);
        ip(&["-n", name, "link", "set", "lo", "up"]);
        ip(&["-n", name, "link", "set", &there, "up"]);
        network.mend();
        network
    }

    /// A command that runs on the far side.
    pub fn command(&self, binary: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(binary);
        command
    }

    /// From now on nothing passes, and nobody is told.
    pub fn cut(&self) {
        ip(&["link", "set", &self.device, "down"]);
    }

    pub fn mend(&self) {
        ip(&["link", "set", &self.device, "up"]);
    }
}

impl Default for CutNetwork {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for CutNetwork {
    fn drop(&mut self) {
        // What could not be made cannot be removed; the test has said why.
        let _gone = Command::new("ip").args(["link", "del", &self.device]).status();
        let _gone = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn ip(arguments: &[&str]) {
    let done = Command::new("ip").args(arguments).output();
    let done = done.expect("iproute2 is installed");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "ip {}: {said}; this test needs root", arguments.join(" "));
}
