//! Messages over `KvTransfer.Push`, tuned as measured in `docs/protocol.md`.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use baton_proto::internal::kv_staging_client::KvStagingClient;
use baton_proto::internal::kv_staging_server::{KvStaging, KvStagingServer};
use baton_proto::internal::{AttachRequest, AttachResponse};
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use http::HeaderValue;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tower::Service;

use super::ucx::{Attaching, Fallback, Ucx};
use super::{Carried, Incoming, STREAM_MESSAGES_MAX, Transport, TransportStream};
use crate::TransferError;
use crate::memory::FrameMemory;
use crate::message::{Body as Says, KvMessage};
use crate::pace::LinkPace;

pub(crate) mod body;

use body::Chunks;

type Messages = BoxStream<'static, Result<KvMessage, TransferError>>;

const SERVICE: &str = "baton.internal.v1.KvTransfer";
const PUSH_PATH: &str = "/baton.internal.v1.KvTransfer/Push";
const CONTENT_TYPE: &str = "application/grpc";
/// A whole KV frame goes in one, by one system call: since nothing is copied on the way that is
/// faster than smaller ones, and as fast as plain TCP.
const HTTP2_FRAME_BYTES: u32 = (1 << 20) + 4096;
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
const KEEPALIVE: Duration = Duration::from_secs(5);
/// A peer that does not answer within it counts as gone, as one that is silent does.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Peers that a transport keeps something of; more are connected anew.
pub(super) const PEERS_MAX: usize = 1024;
const BACKLOG_MAX: usize = 256;
/// Names the sender's region for other ways than gRPC; in the call's metadata.
const TOKEN_KEY: &str = "baton-kv-link";

/// The client's side: one connection for each peer, apart from control.
#[derive(Debug, Default)]
pub struct GrpcTransport {
    peers: Mutex<HashMap<String, Peer>>,
}

/// What is kept of a peer.
#[derive(Clone, Debug)]
struct Peer {
    channel: Channel,
    pace: Arc<LinkPace>,
}

impl GrpcTransport {
    pub fn new() -> Self {
        Self::default()
    }

    /// The peer's connection, which tonic makes when it is first used and again where it broke.
    fn peer(&self, peer: &str) -> Result<Peer, TransferError> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = peers.get(peer) {
            return Ok(peer.clone());
        }
        let channel = dial(peer)?;
        if peers.len() >= PEERS_MAX {
            peers.clear();
        }
        let kept = Peer { channel, pace: Arc::default() };
        peers.insert(peer.to_owned(), kept.clone());
        Ok(kept)
    }

    pub(super) fn pace(&self, peer: &str) -> Result<Arc<LinkPace>, TransferError> {
        Ok(self.peer(peer)?.pace)
    }

    pub(super) fn staging(&self, peer: &str) -> Result<KvStagingClient<Channel>, TransferError> {
        Ok(KvStagingClient::new(self.peer(peer)?.channel))
    }

    /// Opens a stream that carries `chunks`; `token` names the sender's region at the receiver,
    /// where some of the frames go another way.
    pub(super) async fn open(
        &self,
        peer: &str,
        token: Option<u64>,
        chunks: BoxStream<'static, Bytes>,
    ) -> Result<Messages, TransferError> {
        let mut channel = self.peer(peer)?.channel;
        let request = push_request(chunks, token);
        let call = async {
            poll_fn(|cx| channel.poll_ready(cx)).await?;
            channel.call(request).await
        };
        let answer = match tokio::time::timeout(CONNECT_TIMEOUT, call).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(unreachable(peer, &Status::from_error(error.into()))),
            Err(late) => Err(unreachable(peer, &late)),
        };
        // A connection that is ending may look ready to the next call as well.
        let answer = answer.inspect_err(|_| self.disconnect(peer))?;
        if let Some(status) = Status::from_header_map(answer.headers()) {
            return Err(unreachable(peer, &status));
        }
        if !answer.status().is_success() {
            return Err(unreachable(peer, &answer.status()));
        }
        Ok(body::Messages::new(answer.into_body(), FrameMemory::heap()).boxed())
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
            if matches!(message.body, Says::Frame(_)) {
                counted.count_grpc(chunk.len());
            }
            chunk
        });
        let incoming = self.open(peer, None, chunks.boxed()).await?;
        let pace = self.pace(peer)?;
        Ok(TransportStream { outgoing, incoming, features: 0, carried, pace })
    }

    fn disconnect(&self, peer: &str) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        // The pace is the link's, and UCX may still use it.
        if let (Some(kept), Ok(channel)) = (peers.get_mut(peer), dial(peer)) {
            kept.channel = channel;
        }
    }
}

/// A connection that is made when it is first used.
fn dial(peer: &str) -> Result<Channel, TransferError> {
    let endpoint =
        Endpoint::from_shared(peer.to_owned()).map_err(|error| unreachable(peer, &error))?;
    Ok(endpoint
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .connect_lazy())
}

/// The server's side: hands each stream to whoever has the [`Incoming`].
#[derive(Clone, Debug)]
pub struct GrpcListener {
    streams: mpsc::Sender<TransportStream>,
    ucx: Option<Attaching>,
    /// Whether frames may come over gRPC though there is UCX.
    fallback: Fallback,
    memory: FrameMemory,
}

/// The gRPC services, for a server made by [`server`], and the streams that come through them.
/// Frames come to lie in `memory`. With `ucx`, senders may send their frames that way, or must.
pub fn listener(memory: FrameMemory, ucx: Option<(Ucx, Fallback)>) -> (Routes, Incoming) {
    let (streams, incoming) = mpsc::channel(BACKLOG_MAX);
    let (ucx, fallback) = ucx
        .map_or((None, Fallback::Allowed), |(ucx, fallback)| (Some(Attaching::new(ucx)), fallback));
    let listener = GrpcListener { streams, ucx, fallback, memory };
    let staging = KvStagingServer::new(listener.clone());
    (Routes::new(listener).add_service(staging), incoming)
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

impl GrpcListener {
    async fn push(self, request: http::Request<Body>) -> Result<Chunks, Status> {
        let token = request.headers().get(TOKEN_KEY).and_then(|token| token.to_str().ok());
        let token = token.and_then(|token| token.parse().ok());
        let (outgoing, messages) = mpsc::channel(STREAM_MESSAGES_MAX);
        let carried = Arc::new(Carried::default());
        let counted = carried.clone();
        let incoming = body::Messages::new(request.into_body(), self.memory);
        let incoming = incoming.inspect(move |message| {
            if let Ok(KvMessage { body: Says::Frame(frame), .. }) = message {
                counted.count_grpc(frame.payload().len());
            }
        });
        let is_forbidden = self.fallback == Fallback::Forbidden;
        let incoming = incoming.map(move |message| match message {
            Ok(KvMessage { body: Says::Frame(frame), .. }) if is_forbidden => {
                let error = TransferError::GrpcForbidden;
                tracing::warn!(frame = %frame.key(), %error, "a frame came over gRPC");
                Err(error)
            }
            message => message,
        });
        let incoming = incoming.boxed();
        let (chunks, incoming, features) = match (&self.ucx, token) {
            (Some(ucx), Some(token)) if ucx.begin(token).await => {
                ucx.merge(token, messages, incoming, carried.clone())
            }
            _ if is_forbidden => {
                return Err(Status::failed_precondition(TransferError::GrpcForbidden.to_string()));
            }
            _ => {
                let chunks = ReceiverStream::new(messages).map(|message| message.encode());
                (chunks.boxed(), incoming, 0)
            }
        };
        let pace = Arc::default();
        let stream = TransportStream { outgoing, incoming, features, carried, pace };
        self.streams
            .try_send(stream)
            .map_err(|_| Status::resource_exhausted("the receiver takes no more KV streams now"))?;
        Ok(Chunks::response(chunks))
    }
}

impl NamedService for GrpcListener {
    const NAME: &'static str = SERVICE;
}

/// `Push` by hand, for [`body`]'s sake.
impl Service<http::Request<Body>> for GrpcListener {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let listener = self.clone();
        Box::pin(async move {
            let pushed = match request.uri().path() {
                PUSH_PATH => listener.push(request).await,
                other => Err(Status::unimplemented(format!("{other} is no call of {SERVICE}"))),
            };
            Ok(match pushed {
                Ok(chunks) => {
                    let mut response = http::Response::new(Body::new(chunks));
                    let grpc = HeaderValue::from_static(CONTENT_TYPE);
                    response.headers_mut().insert(http::header::CONTENT_TYPE, grpc);
                    response
                }
                Err(status) => status.into_http(),
            })
        })
    }
}

#[async_trait]
impl KvStaging for GrpcListener {
    async fn attach(
        &self,
        request: Request<AttachRequest>,
    ) -> Result<Response<AttachResponse>, Status> {
        let Some(ucx) = &self.ucx else {
            return Err(Status::failed_precondition("the receiver takes KV over gRPC only"));
        };
        ucx.attach(request.into_inner()).await.map(Response::new)
    }
}

fn push_request(chunks: BoxStream<'static, Bytes>, token: Option<u64>) -> http::Request<Body> {
    let mut request = http::Request::new(Body::new(Chunks::request(chunks)));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static(PUSH_PATH);
    let headers = request.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    headers.insert(http::header::TE, HeaderValue::from_static("trailers"));
    if let Some(token) = token {
        headers.insert(TOKEN_KEY, token.into());
    }
    request
}

fn unreachable(peer: &str, reason: &dyn std::fmt::Display) -> TransferError {
    TransferError::Connect { peer: peer.to_owned(), reason: reason.to_string() }
}
