//! The same messages inside one process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{Incoming, STREAM_MESSAGES_MAX, Transport, TransportStream};
use crate::TransferError;
use crate::message::KvMessage;

/// Streams that wait to be taken by a listener.
const BACKLOG_MAX: usize = 256;

/// A network of names within this process; clones share it.
#[derive(Clone, Debug, Default)]
pub struct MemoryTransport {
    listeners: Arc<Mutex<HashMap<String, mpsc::Sender<TransportStream>>>>,
}

impl MemoryTransport {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes streams for `name`, in place of whoever did before.
    pub fn listen(&self, name: impl Into<String>) -> Incoming {
        let (streams, incoming) = mpsc::channel(BACKLOG_MAX);
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.insert(name.into(), streams);
        incoming
    }
}

#[async_trait]
impl Transport for MemoryTransport {
    async fn connect(&self, peer: &str) -> Result<TransportStream, TransferError> {
        let unreachable = |reason: &str| TransferError::Connect {
            peer: peer.to_owned(),
            reason: reason.to_owned(),
        };
        let listener = {
            let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
            listeners.get(peer).cloned().ok_or_else(|| unreachable("nobody listens"))?
        };
        let (here, there) = pair();
        listener.try_send(there).map_err(|_| unreachable("the listener takes no more streams"))?;
        Ok(here)
    }
}

/// Two ends of one stream.
pub fn pair() -> (TransportStream, TransportStream) {
    let (to_right, from_left) = mpsc::channel(STREAM_MESSAGES_MAX);
    let (to_left, from_right) = mpsc::channel(STREAM_MESSAGES_MAX);
    (end(to_right, from_right), end(to_left, from_left))
}

fn end(outgoing: mpsc::Sender<KvMessage>, from: mpsc::Receiver<KvMessage>) -> TransportStream {
    TransportStream {
        pace: Arc::default(),
        outgoing,
        incoming: ReceiverStream::new(from).map(Ok).boxed(),
        features: 0,
        carried: Arc::default(),
    }
}
