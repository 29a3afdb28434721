//! What moves KV between nodes: a runtime of its own and, where it is wanted and there, UCX.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_kv_transfer::memory::FrameMemory;
use baton_kv_transfer::transport::Transport;
use baton_kv_transfer::transport::grpc::GrpcTransport;
use baton_kv_transfer::transport::ucx::{
    Counters, Fallback, Ucx, UcxConfig, UcxState, UcxTransport,
};
use baton_proto::internal::KvWay;
use baton_runtime::own_runtime::OwnRuntime;
use baton_types::{Incarnation, NodeId};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGauge, Opts};
use serde::{Deserialize, Serialize};

use crate::{NodeConfig, ServerError};

mod inbound;
mod metrics;
mod outbound;
mod prefix;
mod speed;

pub use inbound::{Grants, KvServer, Taken, place_frame};
pub use outbound::{Destination, Outbound, Sent};
pub use prefix::{PrefixHolder, to_kv_span};
pub(crate) use speed::SendSpeed;

/// Frames that lie ready to be sent at once, in memory that UCX knows; more come from the heap.
const FRAMES: usize = 64;
const FRAME_BYTES: usize = (1 << 20) + 4096;

/// The device of the loopback addresses, as UCX names it.
const LOOPBACK: &str = "lo";

/// How KV travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum KvTransport {
    /// Over UCX where both nodes have it, else over gRPC.
    #[default]
    Auto,
    Grpc,
    /// Over UCX alone: a node without it does not start, a transfer without it fails.
    Ucx,
}

impl KvTransport {
    pub fn as_str(self) -> &'static str {
        match self {
            KvTransport::Auto => "auto",
            KvTransport::Grpc => "grpc",
            KvTransport::Ucx => "ucx",
        }
    }
}

/// A node's end of all its transfers.
#[derive(Debug)]
pub struct KvLane {
    pub runtime: OwnRuntime,
    /// Where frames lie that go out, or came over gRPC.
    pub memory: FrameMemory,
    pub ucx: Option<Ucx>,
    choice: KvTransport,
}

impl KvLane {
    /// # Errors
    /// Where the system gives no thread or memory, or UCX must be there and is not.
    pub async fn start(config: &NodeConfig) -> Result<Self, ServerError> {
        let choice = config.kv_transport;
        let memory = FrameMemory::new(FRAMES, FRAME_BYTES).map_err(ServerError::KvLane)?;
        let some = |text: &String| (!text.is_empty()).then(|| text.clone());
        let ucx = match choice {
            KvTransport::Grpc => None,
            KvTransport::Auto | KvTransport::Ucx => {
                let wanted = UcxConfig {
                    library: some(&config.ucx_library),
                    tls: some(&config.ucx_tls),
                    devices: some(&config.ucx_devices).or_else(|| loopback_alone(config)),
                    spin: std::time::Duration::from_micros(config.ucx_spin_us),
                };
                Some(Ucx::start(wanted, &memory).map_err(ServerError::KvLane)?)
            }
        };
        if let (KvTransport::Ucx, Some(ucx)) = (choice, &ucx) {
            ucx.ready().await.map_err(ServerError::NoUcx)?;
        }
        let runtime = OwnRuntime::start("kv").map_err(ServerError::KvLane)?;
        Ok(Self { runtime, memory, ucx, choice })
    }

    /// The sending side, for the node of that name.
    ///
    /// # Errors
    /// Where a metric has been registered before.
    pub fn transport(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        metrics: &prometheus::Registry,
    ) -> Result<Arc<dyn Transport>, prometheus::Error> {
        let grpc = GrpcTransport::new();
        let Some((ucx, fallback)) = self.ucx_or_grpc() else { return Ok(Arc::new(grpc)) };
        let transport = Arc::new(UcxTransport::new(grpc, ucx, node, incarnation, fallback));
        metrics.register(Box::new(Fallbacks::new(transport.clone())?))?;
        Ok(transport)
    }

    /// UCX, and whether KV may take gRPC all the same; `None` where gRPC is all there is.
    fn ucx_or_grpc(&self) -> Option<(Ucx, Fallback)> {
        let fallback = match self.choice {
            KvTransport::Ucx => Fallback::Forbidden,
            KvTransport::Auto | KvTransport::Grpc => Fallback::Allowed,
        };
        Some((self.ucx.clone()?, fallback))
    }

    /// Registers what UCX counts.
    ///
    /// # Errors
    /// Where a metric has been registered before.
    pub fn observe(&self, metrics: &prometheus::Registry) -> Result<(), prometheus::Error> {
        match &self.ucx {
            Some(ucx) => metrics.register(Box::new(UcxMetrics::new(ucx.clone())?)),
            None => Ok(()),
        }
    }
}

/// UCX listens on every device that it is given, so a node that only its own machine may reach
/// gives it the loopback alone, unless UCX's own variable says otherwise.
fn loopback_alone(config: &NodeConfig) -> Option<String> {
    let says_otherwise = std::env::var_os("UCX_NET_DEVICES").is_some();
    (config.grpc.ip().is_loopback() && !says_otherwise).then(|| LOOPBACK.to_owned())
}

/// What `baton status` says of a node.
pub(crate) fn ways(ucx: Option<&Ucx>) -> Vec<KvWay> {
    let grpc = KvWay { name: "grpc".into(), ready: true, detail: String::new() };
    let ucx = ucx.map(|ucx| {
        let (ready, detail) = match ucx.state() {
            UcxState::Ready { version, operation } => {
                (true, format!("{version}, {}", operation.as_str()))
            }
            UcxState::Starting => (false, "its self-test runs".to_owned()),
            UcxState::Unavailable { reason } => (false, reason),
        };
        KvWay { name: "ucx".into(), ready, detail }
    });
    std::iter::once(grpc).chain(ucx).collect()
}

/// Reads UCX's counters when it is asked.
struct UcxMetrics {
    ucx: Ucx,
    ready: IntGauge,
    registered: IntGauge,
    bytes: IntCounterVec,
    events: IntCounterVec,
}

impl UcxMetrics {
    fn new(ucx: Ucx) -> Result<Self, prometheus::Error> {
        Ok(Self {
            ucx,
            ready: IntGauge::new("baton_kv_ucx_ready", "1 where KV can travel over UCX.")?,
            registered: IntGauge::new(
                "baton_kv_ucx_registered_bytes",
                "Staging memory that peers may write to now.",
            )?,
            bytes: IntCounterVec::new(
                Opts::new("baton_kv_ucx_bytes_total", "Bytes of frames over UCX."),
                &["direction"],
            )?,
            events: IntCounterVec::new(
                Opts::new(
                    "baton_kv_ucx_events_total",
                    "What went wrong: failed_link, retired_worker; stale frames of a transfer that \
                     has ended; refused messages.",
                ),
                &["event"],
            )?,
        })
    }

    fn read(&self) {
        let Counters {
            sent_bytes,
            received_bytes,
            stale,
            refused,
            failed_links,
            retired_workers,
            registered_bytes,
        } = self.ucx.counters();
        let is_ready = matches!(self.ucx.state(), UcxState::Ready { .. });
        self.ready.set(is_ready.into());
        self.registered.set(registered_bytes.load(Ordering::Relaxed) as i64);
        for (vec, label, counter) in [
            (&self.bytes, "sent", sent_bytes),
            (&self.bytes, "received", received_bytes),
            (&self.events, "stale", stale),
            (&self.events, "refused", refused),
            (&self.events, "failed_link", failed_links),
            (&self.events, "retired_worker", retired_workers),
        ] {
            let shown = vec.with_label_values(&[label]);
            shown.inc_by(counter.load(Ordering::Relaxed).saturating_sub(shown.get()));
        }
    }
}

impl Collector for UcxMetrics {
    fn desc(&self) -> Vec<&Desc> {
        let gauges = self.ready.desc().into_iter().chain(self.registered.desc());
        gauges.chain(self.bytes.desc()).chain(self.events.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.read();
        let gauges = self.ready.collect().into_iter().chain(self.registered.collect());
        gauges.chain(self.bytes.collect()).chain(self.events.collect()).collect()
    }
}

/// Reads a sender's fallbacks when it is asked.
struct Fallbacks {
    transport: Arc<UcxTransport>,
    fallbacks: IntCounterVec,
}

impl Fallbacks {
    fn new(transport: Arc<UcxTransport>) -> Result<Self, prometheus::Error> {
        let opts = Opts::new(
            "baton_kv_transport_fallbacks_total",
            "Transfers that took gRPC though UCX is wanted, by reason: the peer has none, or the \
             link failed.",
        );
        Ok(Self { transport, fallbacks: IntCounterVec::new(opts, &["reason"])? })
    }
}

impl Collector for Fallbacks {
    fn desc(&self) -> Vec<&Desc> {
        self.fallbacks.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (reason, count) in self.transport.fallbacks() {
            let shown = self.fallbacks.with_label_values(&[reason]);
            shown.inc_by(count.saturating_sub(shown.get()));
        }
        self.fallbacks.collect()
    }
}
