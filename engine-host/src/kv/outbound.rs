//! Sends KV to other nodes.

use std::sync::Arc;

use baton_kv_transfer::TransferError;
use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::send::{self, Outgoing};
use baton_kv_transfer::sender::{Sender, SenderConfig, SenderIdentity, SenderReport};
use baton_kv_transfer::transport::{Carried, Transport};
use baton_types::Error;
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

use super::KvLane;
use crate::{NodeConfig, NodeService};

/// The sending side of a node. Clones are the same.
#[derive(Clone, Debug)]
pub struct Outbound {
    node: NodeService,
    clock: Clock,
    transport: Arc<dyn Transport>,
    /// Transfers run there.
    runtime: tokio::runtime::Handle,
    config: SenderConfig,
}

/// Where a transfer goes.
#[derive(Clone, Debug)]
pub struct Destination {
    url: String,
    /// The request's field that names it.
    field: &'static str,
}

impl Destination {
    /// # Errors
    /// `InvalidArgument` where the address that `field` holds is none.
    pub fn new(field: &'static str, address: &str) -> Result<Self, Error> {
        let url = format!("http://{address}");
        match baton_runtime::grpc::endpoint(&url) {
            Ok(_) => Ok(Self { url, field }),
            Err(error) => Err(Error::invalid(field, format!("{field}: {error}"))),
        }
    }

    /// Names the field where it is the node there that fails, or the way to it.
    fn to_error(&self, error: &TransferError) -> Error {
        let message = format!("the handoff to {} failed: {error}", self.url);
        let field = error.is_of_the_peer().then(|| self.field.to_owned());
        Error { field, ..Error::new(error.code(), message) }
    }
}

/// What a transfer took, and which way its frames went.
#[derive(Debug)]
pub struct Sent {
    pub report: SenderReport,
    pub carried: Arc<Carried>,
}

impl Sent {
    /// `grpc`, `ucx`, `ucx, then grpc`; empty where no frame went.
    pub fn way(&self) -> &'static str {
        match (self.carried.ucx_bytes(), self.carried.grpc_bytes()) {
            (0, 0) => "",
            (0, _) => "grpc",
            (_, 0) => "ucx",
            (_, _) => "ucx, then grpc",
        }
    }

    /// Why frames did not take UCX, or not all the way, where it is wanted.
    pub fn fallback(&self) -> &str {
        self.carried.fallback().unwrap_or_default()
    }
}

impl Outbound {
    pub fn new(
        node: NodeService,
        lane: &KvLane,
        transport: Arc<dyn Transport>,
        config: &NodeConfig,
    ) -> Self {
        let (timing, memory) = (config.timing(), lane.memory.clone());
        Self {
            node,
            clock: Clock::start(),
            transport,
            runtime: lane.runtime.handle().clone(),
            config: SenderConfig { timing, memory, ..SenderConfig::default() },
        }
    }

    /// A machine for a transfer under that grant; with `kv_conversion` it may be for a node of
    /// another precision of KV, for which the caller converts.
    ///
    /// # Errors
    /// `InvalidArgument`, or `FailedPrecondition` where it is for another node, model or
    /// arithmetic.
    pub fn open(&self, grant: Bytes, within_ms: u64, kv_conversion: bool) -> Result<Sender, Error> {
        let model = self.node.host.model();
        let identity = SenderIdentity {
            node: self.node.id.clone(),
            incarnation: self.node.incarnation.get(),
            fingerprint: model.fingerprint,
            numerics: model.numerics.clone(),
        };
        let now_ms = self.clock.now_ms();
        let deadline_ms = now_ms.saturating_add(within_ms);
        let config = SenderConfig { kv_conversion, ..self.config.clone() };
        Sender::open(config, identity, grant, now_ms, deadline_ms)
            .map_err(|error| Error::new(error.code(), format!("the handoff failed: {error}")))
    }

    /// Sends `spans` there until the receiver has committed them.
    ///
    /// # Errors
    /// Why it has not; the error names the destination's field where that is at fault.
    pub async fn send(
        &self,
        sender: Sender,
        to: Destination,
        spans: mpsc::Receiver<Outgoing>,
        cancel: CancellationToken,
    ) -> Result<Sent, Error> {
        let span = tracing::info_span!("transfer", peer = to.url);
        let peer = to.url.clone();
        let (transport, clock) = (self.transport.clone(), self.clock);
        let transfer = async move {
            let stream = transport.connect(&peer).await?;
            let carried = stream.carried.clone();
            let driven = send::drive(sender, stream, spans, clock, cancel).await;
            if let Err(TransferError::PeerSilent { .. }) = &driven {
                transport.disconnect(&peer);
            }
            Ok(Sent { report: driven?, carried })
        };
        // Dropped with this future.
        let task = AbortOnDropHandle::new(self.runtime.spawn(transfer.instrument(span)));
        match task.await {
            Ok(result) => result.map_err(|error: TransferError| to.to_error(&error)),
            Err(error) => Err(Error::internal(format!("the transfer ended by itself: {error}"))),
        }
    }
}
