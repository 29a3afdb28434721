//! The seam between the state machines and whatever carries their messages.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use futures::stream::BoxStream;
use tokio::sync::mpsc;

use crate::TransferError;
use crate::message::KvMessage;
use crate::pace::LinkPace;

pub mod grpc;
pub mod memory;
pub mod ucx;

/// Messages that wait inside one direction of a stream. Bytes are bounded by credit.
pub const STREAM_MESSAGES_MAX: usize = 64;

/// One handoff's stream, seen from one end. Dropping it closes both directions.
pub struct TransportStream {
    /// Bounded; closed when the stream has ended.
    pub outgoing: mpsc::Sender<KvMessage>,
    /// In order. `Err(Message)` is one message that cannot be read, and the stream goes on; any
    /// other error, or the end, is the end of the stream.
    pub incoming: BoxStream<'static, Result<KvMessage, TransferError>>,
    /// What this stream can do besides; see [`Open::features`](crate::message::Open::features).
    pub features: u32,
    pub carried: Arc<Carried>,
    /// How fast the way to the peer is; of the sending end.
    pub pace: Arc<LinkPace>,
}

/// Which way a stream's frames went, as the end that has it counts.
#[derive(Debug, Default)]
pub struct Carried {
    grpc_bytes: AtomicU64,
    ucx_bytes: AtomicU64,
    fallback: OnceLock<String>,
}

impl Carried {
    pub(crate) fn count_grpc(&self, bytes: usize) {
        self.grpc_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_ucx(&self, bytes: usize) {
        self.ucx_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Whether it is the first.
    pub(crate) fn set_fallback(&self, why: String) -> bool {
        self.fallback.set(why).is_ok()
    }

    pub fn grpc_bytes(&self) -> u64 {
        self.grpc_bytes.load(Ordering::Relaxed)
    }

    pub fn ucx_bytes(&self) -> u64 {
        self.ucx_bytes.load(Ordering::Relaxed)
    }

    /// Why frames took gRPC though another way is configured.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.get().map(String::as_str)
    }
}

impl TransportStream {
    /// Gives the transport what it takes at once, before the stream is dropped; what it does not
    /// take is lost, and the peer sees the stream end.
    pub(crate) fn send_last(&self, messages: impl IntoIterator<Item = KvMessage>) {
        for message in messages {
            if self.outgoing.try_send(message).is_err() {
                return;
            }
        }
    }
}

impl fmt::Debug for TransportStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TransportStream")
    }
}

/// Streams that peers have opened, for the receiving node to take.
pub type Incoming = mpsc::Receiver<TransportStream>;

/// Opens streams to receiving nodes.
#[async_trait]
pub trait Transport: Send + Sync + fmt::Debug {
    /// Opens a stream to the node at `peer` (for gRPC `http://host:port`, in memory a name).
    /// Connections are kept for the next transfer and made anew where they broke.
    ///
    /// Cancel safe: a dropped future leaves no stream.
    ///
    /// # Errors
    /// `Connect` where the peer cannot be reached.
    async fn connect(&self, peer: &str) -> Result<TransportStream, TransferError>;

    /// The peer was not heard, and the kept connection to it may be dead without anybody having
    /// been told: streams that are open keep it, the next one makes another.
    fn disconnect(&self, _peer: &str) {}
}
