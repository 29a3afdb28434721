//! How fast frames travel between two processes: what `baton bench transfer` measures.
//!
//! The way is the transports' own; only what a level leaves out is left out.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_types::{
    Epoch, Error, Incarnation, KvDtype, ModelFingerprint, NodeId, NumericsVersion, RequestId,
    TokenOutput, TransferId,
};
use bytes::Bytes;
use futures::StreamExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;

use crate::TransferError;
use crate::clock::Clock;
use crate::frame::{Frame, FrameHeader, FrameKey, KIND_CANONICAL, PAYLOAD_MAX_BYTES, WireLayout};
use crate::grant::{Grant, GrantMinter};
use crate::memory::FrameMemory;
use crate::message::{
    Body, CHECKSUM_CRC32C, Commit, CommitInfo, Context, KvMessage, Open, OpenAccepted, VERSION_MAX,
    VERSION_MIN,
};
use crate::receive::{self, Placer, ReceiverOutcome};
use crate::receiver::{Receiver, ReceiverConfig};
use crate::send::{self, Outgoing};
use crate::sender::{Sender, SenderConfig, SenderIdentity};
use crate::split::KvSpan;
use crate::transport::ucx::{Fallback, Ucx};
use crate::transport::{Incoming, Transport, TransportStream, grpc};

mod framed_tcp;

pub use framed_tcp::{send_framed, serve_framed};

/// What is done to each frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Frames travel as they are, into the receiver's memory: over UCX into the staging region,
    /// over gRPC into frame memory.
    Wire,
    /// As `Wire`, and checksums are made and checked.
    Checked,
    /// As `Wire`, and they are copied into their destination.
    Placed,
    /// The whole protocol: credit, checksums, placement into pages.
    Handoff,
}

impl Level {
    pub const ALL: [Level; 4] = [Level::Wire, Level::Checked, Level::Placed, Level::Handoff];

    pub fn as_str(self) -> &'static str {
        match self {
            Level::Wire => "wire",
            Level::Checked => "checked",
            Level::Placed => "placed",
            Level::Handoff => "handoff",
        }
    }

    fn number(self) -> u8 {
        Self::ALL.iter().position(|level| *level == self).unwrap_or_default() as u8
    }
}

/// What a sender sends.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub level: Level,
    /// Payload of a message; more than a frame takes goes as several.
    pub message_bytes: usize,
    /// Streams at once.
    pub streams: usize,
    /// Over all streams.
    pub total_bytes: u64,
    /// For `Handoff`: a prompt of so many tokens of that shape is one message.
    pub layout: WireLayout,
    pub tokens: u32,
}

impl Plan {
    /// Of a prompt's one layer.
    fn span_bytes(&self) -> usize {
        self.tokens as usize * self.layout.token_layer_bytes()
    }
}

/// A plan's bytes on their way, from the first to the last: how long that took, and what a meter
/// said before and after. What was prepared before is no part of it.
#[derive(Clone, Copy, Debug)]
pub struct Window<T> {
    pub took: Duration,
    pub before: T,
    pub after: T,
    /// Payload of all whole messages or prompts: the plan's total, or what it needs of them.
    pub bytes: u64,
}

/// Memory larger than the caches, so that each byte comes from DRAM as a prompt's KV would.
pub const ARENA_BYTES: usize = 512 << 20;
/// One stream's part of it, where there are many.
const ARENA_LEAST_BYTES: usize = 16 << 20;

const NODE: &str = "bench";
const DEADLINE: Duration = Duration::from_secs(600);
const OPEN_WITHIN: Duration = Duration::from_secs(10);
/// Tokens of one page of the destination.
const PAGE_TOKENS: usize = 16;

/// Takes streams until the process ends.
///
/// # Errors
/// Where the server fails.
pub async fn serve(
    listening: TcpListener,
    memory: FrameMemory,
    ucx: Option<Ucx>,
    arenas: usize,
) -> io::Result<()> {
    let (services, incoming) = grpc::listener(memory, ucx.map(|ucx| (ucx, Fallback::Forbidden)));
    // One destination for each stream that runs at once, touched before anybody waits for it.
    let arena_bytes = (ARENA_BYTES / arenas.max(1)).max(ARENA_LEAST_BYTES);
    let arenas = vec![vec![1; arena_bytes]; arenas];
    tokio::spawn(take_all(incoming, arenas));
    let connections = TcpIncoming::from(listening).with_nodelay(Some(true));
    let server = grpc::server().add_routes(services);
    server.serve_with_incoming(connections).await.map_err(io::Error::other)
}

async fn take_all(mut incoming: Incoming, mut spare: Vec<Vec<u8>>) {
    let (give_back, mut given_back) = mpsc::unbounded_channel();
    let are_needed = !spare.is_empty();
    while let Some(stream) = incoming.recv().await {
        let arena = match spare.pop() {
            Some(arena) => arena,
            // A stream's next prompt may come before the last one's has been given back.
            None if are_needed => given_back.recv().await.unwrap_or_default(),
            None => Vec::new(),
        };
        let give_back = give_back.clone();
        tokio::spawn(async move {
            let mut destination = Destination { arena, at: 0 };
            if let Err(error) = take(stream, &mut destination).await {
                tracing::warn!(%error, "a stream failed");
            }
            // Whoever takes arenas lives as long as the server.
            let _ended = give_back.send(destination.arena);
        });
    }
}

struct Destination {
    arena: Vec<u8>,
    at: usize,
}

impl Destination {
    fn put(&mut self, bytes: &[u8]) {
        if self.at + bytes.len() > self.arena.len() {
            self.at = 0;
        }
        self.arena[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

/// Takes one stream. Its `Open` holds a grant, or in its place one byte that says the level.
async fn take(
    mut stream: TransportStream,
    destination: &mut Destination,
) -> Result<(), TransferError> {
    let (_, first) = receive::read_open(&mut stream, OPEN_WITHIN).await?;
    let Body::Open(open) = &first.body else { return Err(TransferError::Closed) };
    let &[level] = &open.grant[..] else {
        return take_handoff(stream, first, destination).await;
    };
    let context = first.context;
    let features = open.features & stream.features;
    let accepted = OpenAccepted { version: VERSION_MAX, features, granted_bytes: u64::MAX };
    say(&stream.outgoing, context, Body::OpenAccepted(accepted)).await?;
    let checks = level == Level::Checked.number();
    let copies = level == Level::Placed.number();
    let (mut frames, mut awaited) = (0, None);
    while awaited != Some(frames) {
        match stream.incoming.next().await.ok_or(TransferError::Closed)?? {
            KvMessage { body: Body::Frame(frame), .. } => {
                if copies {
                    destination.put(frame.payload());
                }
                if checks && !frame.is_intact() {
                    return Err(TransferError::Corrupt(frame.key()));
                }
                frames += 1;
            }
            KvMessage { body: Body::Commit(commit), .. } => awaited = Some(commit.frame_count),
            _ => {}
        }
    }
    say(&stream.outgoing, context, Body::Committed).await?;
    // The peer closes when it has read that.
    while stream.incoming.next().await.is_some() {}
    Ok(())
}

async fn take_handoff(
    stream: TransportStream,
    first: KvMessage,
    destination: &mut Destination,
) -> Result<(), TransferError> {
    let Body::Open(open) = &first.body else { return Err(TransferError::Closed) };
    let grant = Grant::read(&open.grant)?;
    let clock = Clock::start();
    let deadline_ms = DEADLINE.as_millis() as u64;
    let pages = Pages {
        layout: grant.layout,
        pages: (grant.tokens as usize).div_ceil(PAGE_TOKENS),
        arena: Mutex::new(std::mem::take(&mut destination.arena)),
    };
    let (config, minter) = (ReceiverConfig::default(), Arc::new(minter()));
    let (mut receiver, _) = Receiver::grant(config, minter, grant, clock.now_ms(), deadline_ms);
    let never = std::future::pending();
    let outcome = receive::drive(&mut receiver, first, stream, &pages, clock, never).await;
    destination.arena = pages.arena.into_inner().unwrap_or_else(PoisonError::into_inner);
    match outcome {
        ReceiverOutcome::Committed => Ok(()),
        ReceiverOutcome::Failed(error) | ReceiverOutcome::Refused(error) => Err(error),
    }
}

/// A secret that both ends of the benchmark know, so that the sender grants to itself.
fn minter() -> GrantMinter {
    GrantMinter::new([1; 32])
}

/// The destination as a node keeps it: `[layer][page][K, V][head][token of the page][dim]`.
struct Pages {
    layout: WireLayout,
    pages: usize,
    arena: Mutex<Vec<u8>>,
}

impl Placer for Pages {
    async fn place(&self, frame: &Frame) -> Result<(), Error> {
        let (key, heads) = (frame.key(), usize::from(self.layout.kv_heads));
        let row = self.layout.half_bytes();
        let half_page = heads * PAGE_TOKENS * row;
        let layer = usize::from(key.layer) * self.pages * 2 * half_page;
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        let mut payload = frame.payload();
        for half in 0..2 {
            for head in usize::from(key.head_first)..usize::from(key.head_first + key.head_count) {
                let mut token = key.token_first as usize;
                let end = token + key.token_count as usize;
                while token < end {
                    let (page, within) = (token / PAGE_TOKENS, token % PAGE_TOKENS);
                    let run = (end - token).min(PAGE_TOKENS - within);
                    let at =
                        layer + (page * 2 + half) * half_page + (head * PAGE_TOKENS + within) * row;
                    let (rows, rest) = payload.split_at(run * row);
                    // A prompt may be larger than the arena: it is speed that is measured.
                    let at = at % (arena.len() - rows.len());
                    arena[at..at + rows.len()].copy_from_slice(rows);
                    (payload, token) = (rest, token + run);
                }
            }
        }
        Ok(())
    }

    async fn activate(&self, _: Commit, _is_converted: bool) -> Result<(), Error> {
        Ok(())
    }
}

async fn say(
    outgoing: &mpsc::Sender<KvMessage>,
    context: Context,
    body: Body,
) -> Result<(), TransferError> {
    let message = KvMessage { context, body };
    outgoing.send(message).await.map_err(|_| TransferError::Closed)
}

/// Sends a plan's bytes, and waits until the receiver has them.
///
/// # Errors
/// Where a stream fails.
pub async fn send<T>(
    transport: Arc<dyn Transport>,
    peer: &str,
    plan: Plan,
    memory: FrameMemory,
    meter: impl Fn() -> T,
) -> Result<Window<T>, TransferError> {
    let (mut streams, mut running) = (Vec::new(), tokio::task::JoinSet::new());
    let source: Bytes = match plan.level {
        Level::Handoff => vec![7; ARENA_BYTES.max(plan.span_bytes())].into(),
        _ => Bytes::new(),
    };
    for at in 0..plan.streams {
        let sending = Sending {
            transport: transport.clone(),
            peer: peer.to_owned(),
            plan,
            bytes: plan.total_bytes / plan.streams as u64,
            id: at as u64,
        };
        let frames = match plan.level {
            Level::Handoff => Vec::new(),
            _ => sending.prepare(&memory),
        };
        streams.push((sending, frames));
    }
    let (before, start) = (meter(), Instant::now());
    for (sending, frames) in streams {
        let (memory, source) = (memory.clone(), source.clone());
        running.spawn(async move {
            match plan.level {
                Level::Handoff => sending.hand_over(memory, source).await,
                _ => sending.send_frames(&frames).await,
            }
        });
    }
    let mut bytes = 0;
    while let Some(sent) = running.join_next().await {
        bytes += sent.map_err(|_| TransferError::Closed)??;
    }
    Ok(Window { took: start.elapsed(), before, after: meter(), bytes })
}

/// One stream of a plan.
struct Sending {
    transport: Arc<dyn Transport>,
    peer: String,
    plan: Plan,
    bytes: u64,
    id: u64,
}

impl Sending {
    fn context(&self) -> Context {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.id.to_le_bytes());
        Context { transfer_id: TransferId(id), epoch: Epoch(1) }
    }

    /// Frames that lie ready, as many as an arena holds; they are sent over and over.
    fn prepare(&self, memory: &FrameMemory) -> Vec<Frame> {
        let frame_bytes = self.plan.message_bytes.min(PAYLOAD_MAX_BYTES);
        let payload = vec![7; frame_bytes];
        let count = (memory.pieces() / self.plan.streams).min(self.frames()).max(1);
        (0..count).map(|at| self.frame(at as u32, &payload, memory)).collect()
    }

    fn frames(&self) -> usize {
        self.bytes.div_ceil(self.plan.message_bytes.min(PAYLOAD_MAX_BYTES) as u64) as usize
    }

    fn frame(&self, token_first: u32, payload: &[u8], memory: &FrameMemory) -> Frame {
        let Context { transfer_id, epoch } = self.context();
        let (layer, token_count, head_first, head_count) = (0, 1, 0, 1);
        let header = FrameHeader {
            transfer_id,
            epoch,
            key: FrameKey { layer, token_first, token_count, head_first, head_count },
            dtype: KvDtype::Bf16,
            kind: KIND_CANONICAL,
            payload_len: payload.len() as u32,
            crc32c: 0,
        };
        Frame::build(header, memory, |out| out.put_slice(payload))
    }

    fn open(&self, grant: Bytes, features: u32) -> Open {
        Open {
            grant,
            sender: NodeId::new(NODE),
            sender_incarnation: Incarnation(1),
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features,
            checksum: CHECKSUM_CRC32C,
            layout: self.plan.layout,
            fingerprint: ModelFingerprint::default(),
            numerics: NumericsVersion(String::new()),
        }
    }

    /// Returns the bytes of their payload.
    async fn send_frames(&self, frames: &[Frame]) -> Result<u64, TransferError> {
        let mut stream = self.transport.connect(&self.peer).await?;
        let context = self.context();
        let open = self.open(vec![self.plan.level.number()].into(), stream.features);
        say(&stream.outgoing, context, Body::Open(Box::new(open))).await?;
        while !matches!(
            stream.incoming.next().await.ok_or(TransferError::Closed)??.body,
            Body::OpenAccepted(_)
        ) {}
        let (count, mut bytes) = (self.frames(), 0);
        for at in 0..count {
            let frame = &frames[at % frames.len()];
            bytes += frame.payload().len() as u64;
            // As dear as making the checksum, which the frame has already.
            if self.plan.level == Level::Checked && !frame.is_intact() {
                return Err(TransferError::Corrupt(frame.key()));
            }
            say(&stream.outgoing, context, Body::Frame(frame.clone())).await?;
        }
        let info = commit_info();
        let commit = Commit { info, frame_count: count as u32, digest: [0; 16] };
        say(&stream.outgoing, context, Body::Commit(Box::new(commit))).await?;
        while stream.incoming.next().await.ok_or(TransferError::Closed)??.body != Body::Committed {}
        Ok(bytes)
    }

    /// Prompt after prompt, out of the source that all streams share. Returns the bytes of KV.
    async fn hand_over(&self, memory: FrameMemory, source: Bytes) -> Result<u64, TransferError> {
        let Plan { layout, tokens, streams, .. } = self.plan;
        let span_bytes = self.plan.span_bytes();
        let prompt_bytes = span_bytes as u64 * u64::from(layout.layers);
        let prompts = self.bytes.div_ceil(prompt_bytes);
        let mut at = source.len() / streams * self.id as usize;
        for _ in 0..prompts {
            let clock = Clock::start();
            let (identity, grant) = self.granted();
            let bytes = minter().mint(&grant, clock.now_ms());
            let deadline_ms = DEADLINE.as_millis() as u64;
            let config = SenderConfig { memory: memory.clone(), ..SenderConfig::default() };
            let sender = Sender::open(config, identity, bytes, clock.now_ms(), deadline_ms)?;
            let stream = self.transport.connect(&self.peer).await?;
            let (spans, receiver) = mpsc::channel(usize::from(layout.layers) + 1);
            for layer in 0..layout.layers {
                if at + span_bytes > source.len() {
                    at = 0;
                }
                let payload = source.slice(at..at + span_bytes);
                at += span_bytes;
                let span = KvSpan { layer, token_first: 0, token_count: tokens, payload };
                // The channel has room for all.
                let _full = spans.try_send(Outgoing::Span(span));
            }
            let _full = spans.try_send(Outgoing::Finish(Box::new(commit_info())));
            send::drive(sender, stream, receiver, clock, CancellationToken::new()).await?;
        }
        Ok(prompts * prompt_bytes)
    }

    fn granted(&self) -> (SenderIdentity, Grant) {
        let (fingerprint, numerics) = (ModelFingerprint::default(), NumericsVersion(String::new()));
        let grant = Grant {
            transfer_id: self.context().transfer_id,
            request_id: RequestId::default(),
            epoch: Epoch(1),
            receiver: NodeId::new(NODE),
            receiver_incarnation: Incarnation(1),
            sender_incarnation: Incarnation(1),
            tokens: self.plan.tokens,
            cached_tokens: 0,
            unseen: 0..0,
            layout: self.plan.layout,
            fingerprint,
            numerics: numerics.clone(),
            choices: 1,
            expiry_ms: DEADLINE.as_millis() as u64,
        };
        let (node, incarnation) = (NodeId::new(NODE), Incarnation(1));
        (SenderIdentity { node, incarnation, fingerprint, numerics }, grant)
    }
}

fn commit_info() -> CommitInfo {
    CommitInfo {
        first_tokens: vec![TokenOutput { choice: 0, index: 0, id: 0, logprobs: None }],
        sampler_digest: [0; 32],
        prompt_logprobs: Vec::new(),
        cached_tokens: 0,
    }
}
