//! Configuration of a router.

use std::net::SocketAddr;

use baton_registry::Role;
use baton_types::{DEADLINE_MAX_MS, NodeId};
use serde::{Deserialize, Serialize};

/// Everything that a router can be told.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterConfig {
    /// Unique in the cluster; empty: made of the gRPC address.
    pub id: String,
    /// The gRPC API listens here.
    pub grpc: SocketAddr,
    /// The OpenAI API, health and metrics listen here.
    pub http: SocketAddr,
    /// `http://host:port` of each etcd member; empty: `nodes` alone.
    #[serde(deserialize_with = "baton_runtime::config::list")]
    pub etcd: Vec<String>,
    /// Before all keys in etcd.
    pub etcd_prefix: String,
    pub lease_ttl_ms: u64,
    /// Nodes that are known without etcd.
    pub nodes: Vec<StaticNode>,
    /// Requests that are dispatched at once; more wait.
    pub max_running: usize,
    /// Requests that wait at most; more get 429.
    pub max_waiting: usize,
    /// A request that no node takes so long gets 429.
    pub queue_timeout_ms: u64,
    /// For requests that name no deadline.
    pub default_deadline_ms: u64,
    /// `max_tokens` of requests that name none; 0: what the context leaves.
    pub default_max_tokens: u32,
    /// Prompts (or what the decode node's cache leaves of them) up to so many tokens are
    /// prefilled at the decode node.
    pub local_prefill_max_tokens: usize,
    /// A prefill node that lacks at least so many tokens of a prompt, which another node holds, is
    /// told to pull them where that is predicted to be faster than computing; 0: never.
    pub prefix_pull_min_tokens: usize,
    /// Where no prefill node holds KV in the decode node's precision, one of another may compute
    /// the prompt, if the nodes convert.
    pub kv_conversion: bool,
    /// Bytes of one HTTP request at most.
    pub max_request_bytes: usize,
    /// A node whose status is not heard so long is given up, and its requests move.
    pub node_silent_ms: u64,
    /// After SIGTERM, how long running requests may go on.
    pub drain_grace_ms: u64,
}

/// A node by its address; what it serves is asked of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticNode {
    pub role: Role,
    /// `host:port` of its gRPC server.
    pub address: String,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            id: String::new(),
            grpc: SocketAddr::from(([127, 0, 0, 1], 50051)),
            http: SocketAddr::from(([127, 0, 0, 1], 8080)),
            etcd: Vec::new(),
            etcd_prefix: "/baton/v1".into(),
            lease_ttl_ms: 5_000,
            nodes: Vec::new(),
            max_running: 256,
            max_waiting: 512,
            queue_timeout_ms: 30_000,
            default_deadline_ms: 600_000,
            default_max_tokens: 0,
            local_prefill_max_tokens: 64,
            prefix_pull_min_tokens: 128,
            kv_conversion: false,
            max_request_bytes: 4 << 20,
            node_silent_ms: 3_000,
            drain_grace_ms: 30_000,
        }
    }
}

impl RouterConfig {
    /// What serde cannot see.
    ///
    /// # Errors
    /// All that is wrong, by key.
    pub fn check(&self) -> Result<(), Vec<String>> {
        let mut wrong = Vec::new();
        for (key, value) in [
            ("max_running", self.max_running as u64),
            ("default_deadline_ms", self.default_deadline_ms),
            ("max_request_bytes", self.max_request_bytes as u64),
            ("node_silent_ms", self.node_silent_ms),
            ("lease_ttl_ms", self.lease_ttl_ms),
        ] {
            if value == 0 {
                wrong.push(format!("{key}: 0 leaves nothing to work with; give at least 1"));
            }
        }
        if self.default_deadline_ms > DEADLINE_MAX_MS {
            let value = self.default_deadline_ms;
            wrong.push(format!(
                "default_deadline_ms: {value} is out of bounds: no request may have more than \
                 {DEADLINE_MAX_MS}"
            ));
        }
        if let Err(problem) = NodeId::check(&self.id) {
            wrong.push(format!("id: {problem}"));
        }
        for node in &self.nodes {
            if node.role == Role::Router {
                wrong.push(format!(
                    "nodes: {} is a router; name prefill and decode nodes",
                    node.address
                ));
            }
            if let Err(error) = baton_runtime::grpc::endpoint(&node.address) {
                wrong.push(format!("nodes: {error}"));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }
}
