//! Takes KV streams in: finds each one's grant, verifies, places, activates.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::backend::Heads;
use baton_engine::core::Engine;
use baton_kv_transfer::TransferError;
use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::frame::Frame;
use baton_kv_transfer::receive::{self, Placer, ReceiverOutcome};
use baton_kv_transfer::receiver::Receiver;
use baton_kv_transfer::transport::{Incoming, TransportStream, grpc};
use baton_runtime::serve::bind;
use baton_types::{Error, TransferId};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tracing::Instrument;

use super::KvLane;
use super::metrics::TransferMetrics;
use crate::{EngineHost, NodeConfig, ServerError};

/// A stream that does not say which grant it is for within so long is closed.
const OPEN_WITHIN: Duration = Duration::from_secs(2);

/// The grants of a node, and the machines that wait for their streams.
pub trait Grants: Send + Sync + 'static {
    type Placer: Placer;
    /// What its holder needs to give a machine back.
    type Ticket: Send;

    /// Gives a stream the machine that its first message names.
    ///
    /// # Errors
    /// `Superseded` where there is none that waits.
    fn take(
        &self,
        transfer: TransferId,
    ) -> Result<Taken<Self::Placer, Self::Ticket>, TransferError>;

    /// Takes a machine back that no stream drives any more.
    fn give_back(&self, receiver: Box<Receiver>, ticket: Self::Ticket, outcome: ReceiverOutcome);
}

/// A machine that a stream drives; giving it back is the stream's last duty.
#[derive(Debug)]
pub struct Taken<P, T> {
    pub receiver: Box<Receiver>,
    pub placer: P,
    /// Ends the transfer.
    pub fence: oneshot::Receiver<TransferError>,
    pub ticket: T,
}

/// Has the engine put a frame into blocks, between two of its steps.
///
/// # Errors
/// As `place`, and as [`EngineHost::ask`].
pub async fn place_frame(
    host: &EngineHost,
    frame: &Frame,
    place: impl FnOnce(&mut Engine, usize, Range<usize>, Heads, &[u8]) -> Result<(), Error>
    + Send
    + 'static,
) -> Result<(), Error> {
    let (key, frame) = (frame.key(), frame.clone());
    let placing = host.ask(move |thread| {
        let heads = Heads::Some { first: key.head_first.into(), count: key.head_count.into() };
        place(&mut thread.engine, key.layer.into(), key.tokens(), heads, frame.payload())
    });
    placing.await?
}

/// A port on which KV is taken.
#[derive(Debug)]
pub struct KvServer {
    listener: TcpListener,
    address: SocketAddr,
}

impl KvServer {
    /// # Errors
    /// Where the port cannot be had.
    pub async fn bind(config: &NodeConfig) -> Result<Self, ServerError> {
        let (listener, address) = bind(SocketAddr::new(config.grpc.ip(), config.kv_port)).await?;
        Ok(Self { listener, address })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves on the lane's runtime until told to stop, or the handle is dropped. `clock` is the
    /// one whose time the grants are made with.
    ///
    /// # Errors
    /// Where a metric has been registered before.
    pub fn serve<G: Grants>(
        self,
        lane: &KvLane,
        grants: Arc<G>,
        clock: Clock,
        metrics: &prometheus::Registry,
        stop: CancellationToken,
    ) -> Result<AbortOnDropHandle<()>, ServerError> {
        let metrics = TransferMetrics::new(metrics)?;
        let (push, incoming) = grpc::listener(lane.memory.clone(), lane.ucx_or_grpc());
        let listener = self.listener.into_std().map_err(ServerError::KvLane)?;
        let serving = lane.runtime.handle().spawn(async move {
            tokio::spawn(serve_streams(incoming, grants, clock, metrics));
            if let Err(error) = serve_kv(listener, push, stop).await {
                tracing::error!(%error, "this node takes no KV any more");
            }
        });
        Ok(AbortOnDropHandle::new(serving))
    }
}

/// Serves on the runtime that it is called on, until told to stop.
async fn serve_kv(
    listener: std::net::TcpListener,
    services: Routes,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let incoming = TcpIncoming::from(TcpListener::from_std(listener)?).with_nodelay(Some(true));
    let server = grpc::server().add_routes(services);
    let served = server.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
    served.map_err(std::io::Error::other)
}

/// Serves streams until their source ends.
async fn serve_streams<G: Grants>(
    mut incoming: Incoming,
    grants: Arc<G>,
    clock: Clock,
    metrics: TransferMetrics,
) {
    while let Some(stream) = incoming.recv().await {
        tokio::spawn(serve_stream(stream, grants.clone(), clock, metrics.clone()));
    }
}

async fn serve_stream<G: Grants>(
    mut stream: TransportStream,
    grants: Arc<G>,
    clock: Clock,
    metrics: TransferMetrics,
) {
    let (transfer_id, first) = match receive::read_open(&mut stream, OPEN_WITHIN).await {
        Ok(open) => open,
        Err(error) => return tracing::info!(%error, "a KV stream was refused"),
    };
    let Taken { mut receiver, placer, mut fence, ticket } = match grants.take(transfer_id) {
        Ok(taken) => taken,
        Err(error) => {
            tracing::info!(%transfer_id, %error, "a KV stream was refused");
            return receive::refuse(&stream, &first, &error);
        }
    };
    let request_id = receiver.current_grant().request_id;
    let (before, carried) = (*receiver.counters(), stream.carried.clone());
    let fence = async {
        match (&mut fence).await {
            Ok(error) => error,
            // Whoever could end the transfer has gone and left it to itself.
            Err(_) => std::future::pending().await,
        }
    };
    let span = tracing::info_span!("transfer", %request_id, %transfer_id);
    let outcome =
        receive::drive(&mut receiver, first, stream, &placer, clock, fence).instrument(span).await;
    metrics.observe(&before, &receiver, &carried, &outcome);
    match &outcome {
        ReceiverOutcome::Committed => {
            tracing::debug!(%request_id, %transfer_id, "transfer committed");
        }
        ReceiverOutcome::Failed(error) | ReceiverOutcome::Refused(error) => {
            tracing::info!(%request_id, %transfer_id, %error, "transfer failed");
        }
    }
    grants.give_back(receiver, ticket, outcome);
}
