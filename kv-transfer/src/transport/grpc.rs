//! Messages over `KvTransfer.Push`, tuned as measured in `docs/protocol.md`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use baton_proto::internal::KvChunk;
use baton_proto::internal::kv_transfer_client::KvTransferClient;
use baton_proto::internal::kv_transfer_server::{KvTransfer, KvTransferServer};
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use super::{Incoming, STREAM_MESSAGES_MAX, Transport, TransportStream};
use crate::TransferError;
use crate::message::{KvMessage, MESSAGE_MAX_BYTES};

const HTTP2_FRAME_BYTES: u32 = 256 << 10;
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
const KEEPALIVE: Duration = Duration::from_secs(5);
/// A peer that does not answer within it counts as gone, as one that is silent does.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A message and the few bytes that protobuf puts before it.
const CHUNK_MAX_BYTES: usize = MESSAGE_MAX_BYTES + 64;
/// Peers whose connection is kept; more are connected anew.
const CHANNELS_MAX: usize = 1024;
const BACKLOG_MAX: usize = 256;

/// The client's side: one connection for each peer, apart from control.
#[derive(Debug, Default)]
pub struct GrpcTransport {
    channels: Mutex<HashMap<String, Channel>>,
}

impl GrpcTransport {
    pub fn new() -> Self {
        Self::default()
    }

    /// The peer's connection, which tonic makes when it is first used and again where it broke.
    fn channel(&self, peer: &str) -> Result<Channel, TransferError> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(peer) {
            return Ok(channel.clone());
        }
        let endpoint =
            Endpoint::from_shared(peer.to_owned()).map_err(|error| unreachable(peer, &error))?;
        let channel = endpoint
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .connect_lazy();
        if channels.len() >= CHANNELS_MAX {
            channels.clear();
        }
        channels.insert(peer.to_owned(), channel.clone());
        Ok(channel)
    }
}

#[async_trait]
impl Transport for GrpcTransport {
    async fn connect(&self, peer: &str) -> Result<TransportStream, TransferError> {
        let (outgoing, chunks) = outgoing();
        let mut client = KvTransferClient::new(self.channel(peer)?)
            .max_decoding_message_size(CHUNK_MAX_BYTES)
            .max_encoding_message_size(CHUNK_MAX_BYTES);
        let answer = tokio::time::timeout(CONNECT_TIMEOUT, client.push(chunks))
            .await
            .map_err(|late| unreachable(peer, &late))?
            .map_err(|status| unreachable(peer, &status))?;
        Ok(TransportStream { outgoing, incoming: incoming(answer.into_inner()) })
    }
}

/// The server's side: hands each stream to whoever has the [`Incoming`].
#[derive(Debug)]
pub struct GrpcListener {
    streams: mpsc::Sender<TransportStream>,
}

/// The gRPC service, for a server made by [`server`], and the streams that come through it.
pub fn listener() -> (KvTransferServer<GrpcListener>, Incoming) {
    let (streams, incoming) = mpsc::channel(BACKLOG_MAX);
    let service = KvTransferServer::new(GrpcListener { streams })
        .max_decoding_message_size(CHUNK_MAX_BYTES)
        .max_encoding_message_size(CHUNK_MAX_BYTES);
    (service, incoming)
}

/// A server with the windows and frame size that make gRPC as fast as plain TCP. It should
/// listen on a port, and run on a runtime, of its own.
pub fn server() -> Server {
    Server::builder()
        .max_frame_size(HTTP2_FRAME_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .tcp_nodelay(true)
}

#[async_trait]
impl KvTransfer for GrpcListener {
    type PushStream = BoxStream<'static, Result<KvChunk, Status>>;

    async fn push(
        &self,
        request: Request<Streaming<KvChunk>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        let (outgoing, chunks) = outgoing();
        let stream = TransportStream { outgoing, incoming: incoming(request.into_inner()) };
        self.streams
            .try_send(stream)
            .map_err(|_| Status::resource_exhausted("this node takes no more KV streams now"))?;
        Ok(Response::new(chunks.map(Ok).boxed()))
    }
}

fn outgoing() -> (mpsc::Sender<KvMessage>, impl Stream<Item = KvChunk>) {
    let (sender, messages) = mpsc::channel::<KvMessage>(STREAM_MESSAGES_MAX);
    let chunks = ReceiverStream::new(messages).map(|message| KvChunk { data: message.encode() });
    (sender, chunks)
}

fn incoming(chunks: Streaming<KvChunk>) -> BoxStream<'static, Result<KvMessage, TransferError>> {
    let decode = |chunk: Result<KvChunk, Status>| match chunk {
        Ok(chunk) => KvMessage::decode(chunk.data).map_err(TransferError::from),
        Err(_) => Err(TransferError::Closed),
    };
    chunks.map(decode).boxed()
}

fn unreachable(peer: &str, reason: &dyn std::fmt::Display) -> TransferError {
    TransferError::Connect { peer: peer.to_owned(), reason: reason.to_string() }
}
