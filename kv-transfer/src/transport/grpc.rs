//! Messages over `KvTransfer.Push`, tuned as measured in `docs/protocol.md`.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use baton_proto::internal::kv_transfer_client::KvTransferClient;
use baton_proto::internal::kv_transfer_server::{KvTransfer, KvTransferServer};
use baton_proto::internal::{AttachRequest, AttachResponse, KvChunk};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use super::ucx::{Attaching, Ucx};
use super::{Carried, Incoming, STREAM_MESSAGES_MAX, Transport, TransportStream};
use crate::TransferError;
use crate::message::{Body, KvMessage, MESSAGE_MAX_BYTES};

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
/// Names the sender's region for other ways than gRPC; in the call's metadata.
const TOKEN_KEY: &str = "baton-kv-link";

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

    pub(super) fn client(&self, peer: &str) -> Result<KvTransferClient<Channel>, TransferError> {
        Ok(KvTransferClient::new(self.channel(peer)?)
            .max_decoding_message_size(CHUNK_MAX_BYTES)
            .max_encoding_message_size(CHUNK_MAX_BYTES))
    }

    /// Opens a stream that carries `chunks`; `token` names the sender's region at the receiver,
    /// where some of the frames go another way.
    pub(super) fn open(
        &self,
        peer: &str,
        token: Option<u64>,
        chunks: BoxStream<'static, Bytes>,
    ) -> BoxFuture<'static, Result<Messages, TransferError>> {
        let (client, peer) = (self.client(peer), peer.to_owned());
        let request = push_request(chunks, token);
        Box::pin(async move {
            match tokio::time::timeout(CONNECT_TIMEOUT, client?.push(request)).await {
                Ok(Ok(answer)) => Ok(incoming(answer.into_inner())),
                Ok(Err(status)) => Err(unreachable(&peer, &status)),
                Err(late) => Err(unreachable(&peer, &late)),
            }
        })
    }
}

#[async_trait]
impl Transport for GrpcTransport {
    async fn connect(&self, peer: &str) -> Result<TransportStream, TransferError> {
        let (outgoing, messages) = mpsc::channel(STREAM_MESSAGES_MAX);
        let carried = Arc::new(Carried::default());
        let counted = carried.clone();
        let chunks = ReceiverStream::new(messages).map(move |message: KvMessage| {
            let chunk = message.encode();
            if matches!(message.body, Body::Frame(_)) {
                counted.count_grpc(chunk.len());
            }
            chunk
        });
        let incoming = self.open(peer, None, chunks.boxed()).await?;
        Ok(TransportStream { outgoing, incoming, features: 0, carried })
    }
}

/// The server's side: hands each stream to whoever has the [`Incoming`].
#[derive(Debug)]
pub struct GrpcListener {
    streams: mpsc::Sender<TransportStream>,
    ucx: Option<Attaching>,
}

/// The gRPC service, for a server made by [`server`], and the streams that come through it. With
/// `ucx`, senders may send their frames that way.
pub fn listener(ucx: Option<Ucx>) -> (KvTransferServer<GrpcListener>, Incoming) {
    let (streams, incoming) = mpsc::channel(BACKLOG_MAX);
    let service = KvTransferServer::new(GrpcListener { streams, ucx: ucx.map(Attaching::new) })
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
        let token = request.metadata().get(TOKEN_KEY).and_then(|token| token.to_str().ok());
        let token = token.and_then(|token| token.parse().ok());
        let (outgoing, messages) = mpsc::channel(STREAM_MESSAGES_MAX);
        let incoming = incoming(request.into_inner());
        let (chunks, incoming, features) = match (&self.ucx, token) {
            (Some(ucx), Some(token)) => ucx.merge(token, messages, incoming).await,
            _ => {
                let chunks = ReceiverStream::new(messages).map(|message| message.encode());
                (chunks.boxed(), incoming, 0)
            }
        };
        let stream = TransportStream { outgoing, incoming, features, carried: Arc::default() };
        self.streams
            .try_send(stream)
            .map_err(|_| Status::resource_exhausted("this node takes no more KV streams now"))?;
        Ok(Response::new(chunks.map(|data| Ok(KvChunk { data })).boxed()))
    }

    async fn attach(
        &self,
        request: Request<AttachRequest>,
    ) -> Result<Response<AttachResponse>, Status> {
        let Some(ucx) = &self.ucx else {
            return Err(Status::failed_precondition("this node takes KV over gRPC only"));
        };
        ucx.attach(request.into_inner()).await.map(Response::new)
    }
}

/// The body of a call.
struct Chunks(BoxStream<'static, Bytes>);

impl Stream for Chunks {
    type Item = KvChunk;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<KvChunk>> {
        self.0.poll_next_unpin(cx).map(|chunk| chunk.map(|data| KvChunk { data }))
    }
}

type Messages = BoxStream<'static, Result<KvMessage, TransferError>>;

fn push_request(chunks: BoxStream<'static, Bytes>, token: Option<u64>) -> Request<Chunks> {
    let mut request = Request::new(Chunks(chunks));
    if let Some(token) = token {
        request.metadata_mut().insert(TOKEN_KEY, token.into());
    }
    request
}

fn incoming(chunks: Streaming<KvChunk>) -> Messages {
    let decode = |chunk: Result<KvChunk, Status>| match chunk {
        Ok(chunk) => KvMessage::decode(chunk.data).map_err(TransferError::from),
        Err(_) => Err(TransferError::Closed),
    };
    chunks.map(decode).boxed()
}

fn unreachable(peer: &str, reason: &dyn std::fmt::Display) -> TransferError {
    TransferError::Connect { peer: peer.to_owned(), reason: reason.to_string() }
}
