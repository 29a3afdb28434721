//! Configuration of a node that holds an engine.

use std::net::SocketAddr;
use std::path::PathBuf;

use baton_engine::cpu::THREADS_MAX;
use baton_engine::load::{WeightsCache, WeightsMemory};
use baton_kv_transfer::timing::Timing;
use baton_kv_transfer::transport::ucx::SPIN_MAX_US;
use baton_types::{KvDtype, NodeId};
use serde::{Deserialize, Serialize};

use crate::KvTransport;

/// Most that one step may have.
const SEQUENCES_MAX: usize = 1 << 16;
const STEP_TOKENS_MAX: usize = 1 << 20;

/// Everything that a prefill or decode node can be told.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    /// Unique in the cluster and stable over restarts; empty: made of role and address.
    pub id: String,
    /// gRPC listens here.
    pub grpc: SocketAddr,
    /// Health and metrics listen here.
    pub http: SocketAddr,
    /// KV is taken on this port of the address of `grpc`; 0: any that is free.
    pub kv_port: u16,
    /// `host:port` under which others reach the gRPC server; empty: as it listens.
    pub advertise: String,
    /// `http://host:port` of each etcd member; empty: the node registers nowhere.
    #[serde(deserialize_with = "baton_runtime::config::list")]
    pub etcd: Vec<String>,
    /// Before all keys in etcd.
    pub etcd_prefix: String,
    /// A node that does not renew its lease so long is gone.
    pub lease_ttl_ms: u64,
    /// A GGUF file, or a folder with safetensors and config.json.
    pub model: PathBuf,
    /// Threads that compute; 0: one for each core.
    pub threads: usize,
    pub isa: IsaChoice,
    /// Memory for the KV pool.
    pub kv_pool_mib: usize,
    /// Precision of the KV pool, and of KV as it travels: `bf16`, `int8` or `int4`.
    pub kv_dtype: KvDtype,
    /// Works with nodes that differ in `kv_dtype` alone: a prefill node converts KV for them, a
    /// decode node takes what was converted.
    pub kv_conversion: bool,
    /// Where packed weights are kept from one start to the next: `beside` the model, `off`, or in
    /// a folder.
    pub weights_cache: WeightsCache,
    /// `auto`: shared by all nodes of a machine where that is not slower; `shared`: always.
    pub weights_memory: WeightsMemory,
    /// Tokens in one KV block; a multiple of 16.
    pub block_tokens: u16,
    /// Sequences in the batch at most.
    pub max_sequences: usize,
    /// Requests that wait for a place at most.
    pub max_waiting: usize,
    /// Prefill tokens in one step at most.
    pub prefill_chunk_tokens: usize,
    /// The same in steps that also decode: bounds how long running answers wait.
    pub mixed_prefill_tokens: usize,
    /// After SIGTERM, how long running requests may go on.
    pub drain_grace_ms: u64,
    /// A grant that nobody opens, or a reservation that nobody runs, ends after so long.
    pub grant_expiry_ms: u64,
    /// Silence after which the other end of a transfer counts as gone.
    pub peer_silent_ms: u64,
    /// `auto`: KV travels over UCX where both nodes have it, else over gRPC; `grpc`; `ucx`: never
    /// over gRPC.
    pub kv_transport: KvTransport,
    /// Path of libucp; empty: where the system has it.
    pub ucx_library: String,
    /// UCX's transports, as `UCX_TLS` names them; empty: as UCX finds them.
    pub ucx_tls: String,
    /// UCX's network devices, as `UCX_NET_DEVICES` names them; empty: all.
    pub ucx_devices: String,
    /// How long UCX's thread polls after its last event before it sleeps.
    pub ucx_spin_us: u64,
}

/// Which kernels run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IsaChoice {
    /// The fastest that this machine has.
    #[default]
    Auto,
    Scalar,
    Avx2,
    Avx512,
}

impl NodeConfig {
    /// Defaults for a node that listens on these loopback ports.
    pub fn on_ports(grpc: u16, http: u16, kv_port: u16) -> Self {
        Self {
            id: String::new(),
            grpc: SocketAddr::from(([127, 0, 0, 1], grpc)),
            http: SocketAddr::from(([127, 0, 0, 1], http)),
            kv_port,
            advertise: String::new(),
            etcd: Vec::new(),
            etcd_prefix: "/baton/v1".into(),
            lease_ttl_ms: 5_000,
            model: PathBuf::new(),
            threads: 0,
            isa: IsaChoice::Auto,
            kv_pool_mib: 1_024,
            kv_dtype: KvDtype::Bf16,
            kv_conversion: false,
            weights_cache: WeightsCache::Beside,
            weights_memory: WeightsMemory::Auto,
            block_tokens: 16,
            max_sequences: 64,
            max_waiting: 256,
            prefill_chunk_tokens: 512,
            mixed_prefill_tokens: 64,
            drain_grace_ms: 30_000,
            grant_expiry_ms: 10_000,
            peer_silent_ms: 2_000,
            kv_transport: KvTransport::Auto,
            ucx_library: String::new(),
            ucx_tls: String::new(),
            ucx_devices: String::new(),
            ucx_spin_us: 20,
        }
    }

    /// How long a transfer's end waits for the other.
    pub fn timing(&self) -> Timing {
        Timing { peer_silent_ms: self.peer_silent_ms, ..Timing::default() }
    }

    /// What serde cannot see.
    ///
    /// # Errors
    /// All that is wrong, by key.
    pub fn check(&self) -> Result<(), Vec<String>> {
        let mut wrong = Vec::new();
        if self.model.as_os_str().is_empty() {
            wrong.push("model: give a GGUF file or a model folder with --model".to_string());
        }
        if self.block_tokens == 0 || !self.block_tokens.is_multiple_of(16) {
            wrong.push(format!("block_tokens: {} is no multiple of 16", self.block_tokens));
        }
        if !self.kv_dtype.is_stored() {
            let want = "bf16, int8 and int4 are";
            wrong.push(format!("kv_dtype: {} is not supported; {want}", self.kv_dtype));
        }
        let unreachable = match self.advertise.parse::<SocketAddr>() {
            Ok(given) => (given.ip().is_unspecified() || given.port() == 0).then_some(given),
            Err(_) if self.advertise.is_empty() && !self.etcd.is_empty() => {
                self.grpc.ip().is_unspecified().then_some(self.grpc)
            }
            Err(_) => None,
        };
        if let Some(nowhere) = unreachable {
            wrong.push(format!(
                "advertise: {nowhere} is no address under which others reach this node; say which \
                 is"
            ));
        }
        if self.ucx_spin_us > SPIN_MAX_US {
            wrong.push(format!(
                "ucx_spin_us: {} keeps a processor busy for ever; at most {SPIN_MAX_US}",
                self.ucx_spin_us
            ));
        }
        if !self.advertise.is_empty()
            && let Err(error) = baton_runtime::grpc::endpoint(&self.advertise)
        {
            wrong.push(format!("advertise: {error}"));
        }
        for (key, value) in [
            ("lease_ttl_ms", self.lease_ttl_ms as usize),
            ("kv_pool_mib", self.kv_pool_mib),
            ("max_sequences", self.max_sequences),
            ("max_waiting", self.max_waiting),
            ("prefill_chunk_tokens", self.prefill_chunk_tokens),
            ("mixed_prefill_tokens", self.mixed_prefill_tokens),
            ("peer_silent_ms", self.peer_silent_ms as usize),
            ("grant_expiry_ms", self.grant_expiry_ms as usize),
        ] {
            if value == 0 {
                wrong.push(format!("{key}: 0 leaves nothing to work with; give at least 1"));
            }
        }
        for (key, value, most) in [
            ("threads", self.threads, THREADS_MAX),
            ("max_sequences", self.max_sequences, SEQUENCES_MAX),
            ("prefill_chunk_tokens", self.prefill_chunk_tokens, STEP_TOKENS_MAX),
            ("mixed_prefill_tokens", self.mixed_prefill_tokens, STEP_TOKENS_MAX),
        ] {
            if value > most {
                wrong.push(format!("{key}: {value} is too much; at most {most}"));
            }
        }
        if let Err(problem) = NodeId::check(&self.id) {
            wrong.push(format!("id: {problem}"));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    pub fn threads_or_cores(&self) -> usize {
        if self.threads > 0 {
            return self.threads;
        }
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    }
}
