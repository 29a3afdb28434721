//! Whole transfers over every transport, with the drivers.
//!
//! UCX must be there: `BATON_TEST_UCX_LIBRARY` names it, else it is the system's.

// Helpers of tests are tests too; clippy sees that only for `#[test]` functions.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::future::{Future, pending};

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::frame::{Frame, WireLayout};
use baton_kv_transfer::grant::{Grant, GrantMinter};
use baton_kv_transfer::memory::FrameMemory;
use baton_kv_transfer::message::{Commit, CommitInfo};
use baton_kv_transfer::receive::{self, Placer, ReceiverOutcome, read_open};
use baton_kv_transfer::receiver::{Receiver, ReceiverConfig};
use baton_kv_transfer::send::{self, Outgoing};
use baton_kv_transfer::sender::{Sender, SenderConfig, SenderIdentity, SenderReport};
use baton_kv_transfer::transport::grpc::{GrpcTransport, listener, server};
use baton_kv_transfer::transport::memory::MemoryTransport;
use baton_kv_transfer::transport::ucx::{Fallback, Ucx};
use baton_kv_transfer::transport::{Incoming, Transport, TransportStream};
use baton_kv_transfer::{KvSpan, TransferError};
use baton_types::{
    Epoch, Error, ErrorCode, Incarnation, KvDtype, ModelFingerprint, NodeId, NumericsVersion,
    RequestId, TokenOutput, TransferId,
};
use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;

mod ucx;

/// A small real model's shape, so that a prompt takes some 20 MB.
const LAYOUT: WireLayout =
    WireLayout { layers: 30, kv_heads: 3, head_dim: 64, dtype: KvDtype::Bf16 };
const TOKENS: u32 = 900;
const CACHED_TOKENS: u32 = 32;
const CHUNK_TOKENS: u32 = 300;
const DEADLINE_MS: u64 = 20_000;

/// Layer, head, token.
type Place = (u16, u16, u32);
/// K and V of one place.
type Rows = (Vec<u8>, Vec<u8>);

/// The destination.
#[derive(Default)]
struct Memory {
    rows: Mutex<HashMap<Place, Rows>>,
    commit: Mutex<Option<Commit>>,
}

impl Placer for Memory {
    async fn place(&self, frame: &Frame) -> Result<(), Error> {
        tokio::task::yield_now().await;
        let key = frame.key();
        let row = LAYOUT.dtype.elements_bytes(usize::from(LAYOUT.head_dim));
        let (k, v) = frame.payload().split_at(frame.payload().len() / 2);
        let mut halves = k.chunks_exact(row).zip(v.chunks_exact(row));
        let mut rows = self.rows.lock().unwrap();
        for head in key.head_first..key.head_first + key.head_count {
            for token in key.token_first..key.token_first + key.token_count {
                let (k, v) = halves.next().unwrap();
                rows.insert((key.layer, head, token), (k.to_vec(), v.to_vec()));
            }
        }
        Ok(())
    }

    async fn activate(&self, commit: Commit, _is_converted: bool) -> Result<(), Error> {
        *self.commit.lock().unwrap() = Some(commit);
        Ok(())
    }
}

/// A byte that depends on its place.
fn byte(layer: u16, half: u32, head: u16, token: u32, at: u32) -> u8 {
    let mixed = u32::from(layer) * 31 + half * 17 + u32::from(head) * 7 + token * 3 + at;
    (mixed.wrapping_mul(2_654_435_761) >> 24) as u8
}

fn row(layer: u16, half: u32, head: u16, token: u32) -> impl Iterator<Item = u8> {
    let bytes = LAYOUT.dtype.elements_bytes(usize::from(LAYOUT.head_dim)) as u32;
    (0..bytes).map(move |at| byte(layer, half, head, token, at))
}

fn span(layer: u16, token_first: u32) -> KvSpan {
    let mut payload = Vec::new();
    for half in 0..2 {
        for head in 0..LAYOUT.kv_heads {
            for token in token_first..token_first + CHUNK_TOKENS {
                payload.extend(row(layer, half, head, token));
            }
        }
    }
    KvSpan { layer, token_first, token_count: CHUNK_TOKENS, payload: payload.into() }
}

fn commit_info() -> CommitInfo {
    let token = |choice| TokenOutput { choice, index: 0, id: 5, logprobs: None };
    CommitInfo {
        first_tokens: vec![token(0), token(1)],
        sampler_digest: [2; 32],
        prompt_logprobs: Vec::new(),
        cached_tokens: 64,
    }
}

fn granted(clock: Clock) -> (Receiver, Bytes) {
    granted_as(clock, 1)
}

fn granted_as(clock: Clock, id: u8) -> (Receiver, Bytes) {
    let grant = Grant {
        transfer_id: TransferId([id; 16]),
        request_id: RequestId([2; 16]),
        epoch: Epoch(1),
        receiver: NodeId::new("decode"),
        receiver_incarnation: Incarnation(3),
        sender_incarnation: Incarnation(4),
        tokens: TOKENS,
        cached_tokens: CACHED_TOKENS,
        unseen: 0..0,
        layout: LAYOUT,
        fingerprint: ModelFingerprint([5; 32]),
        numerics: NumericsVersion("n".into()),
        choices: 2,
        expiry_ms: 5000,
    };
    let minter = Arc::new(GrantMinter::new([6; 32]));
    Receiver::grant(ReceiverConfig::default(), minter, grant, clock.now_ms(), DEADLINE_MS)
}

fn opened(grant: Bytes, clock: Clock) -> Sender {
    let identity = SenderIdentity {
        node: NodeId::new("prefill"),
        incarnation: Incarnation(4),
        fingerprint: ModelFingerprint([5; 32]),
        numerics: NumericsVersion("n".into()),
    };
    Sender::open(SenderConfig::default(), identity, grant, clock.now_ms(), DEADLINE_MS).unwrap()
}

type Sending = JoinHandle<Result<SenderReport, TransferError>>;

/// A sender that is fed the first `chunks` chunks, and all of it and the commit where
/// `chunks * CHUNK_TOKENS` is the prompt; otherwise it waits for more.
fn start(
    grant: Bytes,
    stream: TransportStream,
    clock: Clock,
    chunks: u32,
) -> (Sending, CancellationToken) {
    let (spans, receiver) = mpsc::channel(4);
    let cancel = CancellationToken::new();
    let sending = send::drive(opened(grant, clock), stream, receiver, clock, cancel.clone());
    tokio::spawn(async move {
        for token_first in (0..chunks * CHUNK_TOKENS).step_by(CHUNK_TOKENS as usize) {
            for layer in 0..LAYOUT.layers {
                let _ = spans.send(Outgoing::Span(span(layer, token_first))).await;
            }
        }
        if chunks * CHUNK_TOKENS == TOKENS {
            let _ = spans.send(Outgoing::Finish(Box::new(commit_info()))).await;
        } else {
            spans.closed().await;
        }
    });
    (tokio::spawn(sending), cancel)
}

async fn take(
    incoming: &mut Incoming,
    receiver: &mut Receiver,
    memory: &Memory,
    clock: Clock,
    fence: impl Future<Output = TransferError>,
) -> ReceiverOutcome {
    let mut stream = incoming.recv().await.unwrap();
    let (transfer_id, first) = read_open(&mut stream, Duration::from_secs(1)).await.unwrap();
    assert_eq!(transfer_id, receiver.current_grant().transfer_id);
    receive::drive(receiver, first, stream, memory, clock, fence).await
}

fn check(memory: &Memory) {
    let rows = memory.rows.lock().unwrap();
    let tokens = (TOKENS - CACHED_TOKENS) as usize;
    assert_eq!(rows.len(), tokens * usize::from(LAYOUT.layers * LAYOUT.kv_heads));
    for (&(layer, head, token), (k, v)) in rows.iter() {
        assert!(token >= CACHED_TOKENS);
        assert!(row(layer, 0, head, token).eq(k.iter().copied()));
        assert!(row(layer, 1, head, token).eq(v.iter().copied()));
    }
    assert_eq!(memory.commit.lock().unwrap().as_ref().unwrap().info, commit_info());
}

/// One network of either kind with one listening node.
struct Net {
    transport: Box<dyn Transport>,
    address: String,
    incoming: Incoming,
}

async fn grpc() -> Net {
    let listening = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listening.local_addr().unwrap());
    let incoming = serve(listening, None);
    let transport = Box::new(GrpcTransport::new());
    Net { transport, address, incoming }
}

fn serve(listening: TcpListener, ucx: Option<(Ucx, Fallback)>) -> Incoming {
    let (services, incoming) = listener(FrameMemory::heap(), ucx);
    let serving =
        server().add_routes(services).serve_with_incoming(TcpListenerStream::new(listening));
    tokio::spawn(async move { serving.await.unwrap() });
    incoming
}

fn memory() -> Net {
    let network = MemoryTransport::new();
    let incoming = network.listen("decode");
    Net { transport: Box::new(network), address: "decode".into(), incoming }
}

async fn hand_over(mut net: Net) {
    let clock = Clock::start();
    let (mut receiver, grant) = granted(clock);
    let stream = net.transport.connect(&net.address).await.unwrap();
    let began = Instant::now();
    let (sending, _cancel) = start(grant, stream, clock, TOKENS / CHUNK_TOKENS);
    let memory = Memory::default();
    let outcome = take(&mut net.incoming, &mut receiver, &memory, clock, pending()).await;
    assert_eq!(outcome, ReceiverOutcome::Committed);
    let report = sending.await.unwrap().unwrap();
    println!("{} MB in {:?}", report.bytes / 1_000_000, began.elapsed());
    assert_eq!(report.bytes, receiver.counters().bytes);
    check(&memory);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_handed_over_in_memory() {
    hand_over(memory()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_handed_over_by_grpc() {
    hand_over(grpc().await).await;
}

async fn cancel_at_the_sender(mut net: Net) {
    let clock = Clock::start();
    let (mut receiver, grant) = granted(clock);
    let stream = net.transport.connect(&net.address).await.unwrap();
    let (sending, cancel) = start(grant, stream, clock, 1);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cancel.cancel();
    });
    let memory = Memory::default();
    let outcome = take(&mut net.incoming, &mut receiver, &memory, clock, pending()).await;
    let ReceiverOutcome::Failed(TransferError::PeerAborted { code, .. }) = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(code, ErrorCode::Cancelled);
    assert_eq!(sending.await.unwrap(), Err(TransferError::Cancelled));
    assert!(receiver.is_free());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_sender_tells_the_receiver() {
    cancel_at_the_sender(memory()).await;
    cancel_at_the_sender(grpc().await).await;
    for tls in ucx::TLS {
        cancel_at_the_sender(ucx::net(tls).await).await;
    }
}

async fn fence_and_grant_again(mut net: Net) {
    let clock = Clock::start();
    let (mut receiver, grant) = granted(clock);
    let stream = net.transport.connect(&net.address).await.unwrap();
    let (sending, _cancel) = start(grant, stream, clock, 1);
    let memory = Memory::default();
    let fence = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        TransferError::Superseded
    };
    let outcome = take(&mut net.incoming, &mut receiver, &memory, clock, fence).await;
    assert_eq!(outcome, ReceiverOutcome::Failed(TransferError::Superseded));
    let error = sending.await.unwrap().unwrap_err();
    assert_eq!(error.code(), ErrorCode::FailedPrecondition, "{error}");

    let grant = receiver.regrant(Incarnation(4), clock.now_ms(), DEADLINE_MS).unwrap();
    let stream = net.transport.connect(&net.address).await.unwrap();
    let (sending, _cancel) = start(grant, stream, clock, TOKENS / CHUNK_TOKENS);
    let outcome = take(&mut net.incoming, &mut receiver, &memory, clock, pending()).await;
    assert_eq!(outcome, ReceiverOutcome::Committed);
    assert!(sending.await.unwrap().is_ok());
    check(&memory);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fenced_transfer_is_granted_again_under_the_next_epoch() {
    fence_and_grant_again(memory()).await;
    fence_and_grant_again(grpc().await).await;
    for tls in ucx::TLS {
        fence_and_grant_again(ucx::net(tls).await).await;
    }
}

async fn sender_dies(mut net: Net) {
    let clock = Clock::start();
    let (mut receiver, grant) = granted(clock);
    let stream = net.transport.connect(&net.address).await.unwrap();
    let (sending, _cancel) = start(grant, stream, clock, 1);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        sending.abort();
    });
    let memory = Memory::default();
    let outcome = take(&mut net.incoming, &mut receiver, &memory, clock, pending()).await;
    assert_eq!(outcome, ReceiverOutcome::Failed(TransferError::Closed));
    assert!(receiver.is_free() && clock.now_ms() < 1000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_dies_frees_the_receiver() {
    sender_dies(memory()).await;
    sender_dies(grpc().await).await;
    for tls in ucx::TLS {
        sender_dies(ucx::net(tls).await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_says_nothing_is_given_up() {
    let mut net = grpc().await;
    let clock = Clock::start();
    let (_, grant) = granted(clock);
    let stream = net.transport.connect(&net.address).await.unwrap();
    let (sending, _cancel) = start(grant, stream, clock, 1);
    let silent = net.incoming.recv().await.unwrap();
    let error = sending.await.unwrap().unwrap_err();
    assert!(matches!(error, TransferError::PeerSilent { .. }), "{error}");
    assert!((1000..2500).contains(&clock.now_ms()), "after {} ms", clock.now_ms());
    drop(silent);
}

/// Both ends, and whoever carries their messages, have no processor for longer than a peer may be
/// silent: none takes the other for dead.
async fn nobody_runs_for_a_while(mut net: Net) {
    let clock = Clock::start();
    let (mut receiver, grant) = granted(clock);
    let stream = net.transport.connect(&net.address).await.unwrap();
    let (spans, queued) = mpsc::channel(4);
    let cancel = CancellationToken::new();
    let sending = tokio::spawn(send::drive(opened(grant, clock), stream, queued, clock, cancel));
    let feeding = tokio::spawn(async move {
        for token_first in (0..TOKENS).step_by(CHUNK_TOKENS as usize) {
            // Before the first, and amid the frames.
            tokio::time::sleep(Duration::from_millis(50)).await;
            std::thread::sleep(Duration::from_millis(1_500));
            for layer in 0..LAYOUT.layers {
                spans.send(Outgoing::Span(span(layer, token_first))).await.unwrap();
            }
        }
        spans.send(Outgoing::Finish(Box::new(commit_info()))).await.unwrap();
    });
    let memory = Memory::default();
    let outcome = take(&mut net.incoming, &mut receiver, &memory, clock, pending()).await;
    assert_eq!(outcome, ReceiverOutcome::Committed);
    feeding.await.unwrap();
    sending.await.unwrap().unwrap();
    check(&memory);
}

#[tokio::test]
async fn who_had_no_processor_takes_nobody_for_dead() {
    nobody_runs_for_a_while(memory()).await;
    nobody_runs_for_a_while(grpc().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_peer_that_comes_back_is_connected_anew() {
    // Only the end of its runtime ends a server's connections, as the end of its process does.
    let first = tokio::runtime::Runtime::new().unwrap();
    let mut net = first.spawn(grpc()).await.unwrap();
    let stream = net.transport.connect(&net.address).await.unwrap();
    drop((stream, net.incoming.recv().await));
    first.shutdown_background();
    let mut refused = 0;
    let address = net.address.trim_start_matches("http://").to_owned();
    while net.transport.connect(&net.address).await.is_ok() {
        refused += 1;
        assert!(refused < 100, "the dead server still answers");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    net.incoming = serve(TcpListener::bind(&address).await.unwrap(), None);
    hand_over(net).await;
}

#[tokio::test]
async fn a_peer_that_is_not_there_is_named() {
    for (transport, peer) in [
        (Box::new(MemoryTransport::new()) as Box<dyn Transport>, "nobody"),
        (Box::new(GrpcTransport::new()), "http://127.0.0.1:1"),
        (Box::new(GrpcTransport::new()), "no address"),
    ] {
        let error = transport.connect(peer).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unavailable);
        assert!(error.to_string().contains(peer), "{error}");
    }
}
