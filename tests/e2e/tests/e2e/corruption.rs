//! A link that flips a bit in one frame of a thousand: each is found, no answer changes, and the
//! counters say whose frames they were.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_engine_host::{KvTransport, NodeConfig};
use baton_kv_transfer::TransferError;
use baton_kv_transfer::message::{Body, KvMessage};
use baton_kv_transfer::transport::{Transport, TransportStream};
use baton_router::RouterConfig;
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::{alone, http, load, wait};
use bytes::Bytes;
use tokio::sync::mpsc;

/// One frame of so many is spoilt.
const EVERY: u64 = 1_000;
const REQUESTS: u64 = 24;
/// Where a frame's payload begins, as a message.
const PAYLOAD_AT: usize = 45;

/// Flips bits on their way to a real transport.
#[derive(Debug)]
struct Flipping {
    real: Arc<dyn Transport>,
    frames: Arc<AtomicU64>,
    flipped: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Transport for Flipping {
    async fn connect(&self, peer: &str) -> Result<TransportStream, TransferError> {
        let mut stream = self.real.connect(peer).await?;
        let (outgoing, mut messages) = mpsc::channel::<KvMessage>(1);
        let real = std::mem::replace(&mut stream.outgoing, outgoing);
        let (frames, flipped) = (self.frames.clone(), self.flipped.clone());
        tokio::spawn(async move {
            while let Some(message) = messages.recv().await {
                let at = frames.fetch_add(1, Ordering::Relaxed);
                let message = match message.body {
                    Body::Frame(_) if at % EVERY == EVERY / 2 => {
                        flipped.fetch_add(1, Ordering::Relaxed);
                        flip(&message, at)
                    }
                    _ => message,
                };
                if real.send(message).await.is_err() {
                    return;
                }
            }
        });
        Ok(stream)
    }
}

/// The frame with one bit of its payload another.
fn flip(message: &KvMessage, at: u64) -> KvMessage {
    let mut bytes = message.encode().to_vec();
    let payload = bytes.len() - PAYLOAD_AT;
    bytes[PAYLOAD_AT + at as usize * 7_919 % payload] ^= 1 << (at % 8);
    KvMessage::decode(Bytes::from(bytes)).expect("its header is whole")
}

async fn answers_over(kv_transport: KvTransport) {
    let router = RouterConfig { local_prefill_max_tokens: 0, ..router_config() };
    let node = || NodeConfig {
        kv_transport,
        // Many frames: each span of a layer is one.
        prefill_chunk_tokens: 16,
        mixed_prefill_tokens: 16,
        ..node_config()
    };
    let cases = load::mixed(REQUESTS, 77);
    let plain = Local::start(router.clone(), node(), node()).await;
    let expected = load::start(&[plain.client()], &cases).finish().await;
    plain.end().await;

    let (frames, flipped) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted, spoilt) = (frames.clone(), flipped.clone());
    let wrap = move |real| {
        Arc::new(Flipping { real, frames: counted, flipped: spoilt }) as Arc<dyn Transport>
    };
    let local = Local::start_over(router, node(), node(), wrap).await;
    let got = load::start(&[local.client()], &cases).finish().await;
    let what = format!("bits flipped over {kv_transport:?}");
    load::assert_equal(&expected, &got, &what);
    local.idle(Duration::from_secs(2)).await;
    let flipped = flipped.load(Ordering::Relaxed);
    assert!(flipped >= 5, "{flipped} of {} frames were spoilt", frames.load(Ordering::Relaxed));
    // A stream is counted when its sender has closed it, which may be after the answer. A frame
    // that was slow may have been asked for again and then be a duplicate, which nobody reads.
    wait::until(Duration::from_secs(10), "each to be found, once", || async {
        let metrics = http::metrics(local.decode_http).await.map_err(|error| error.to_string())?;
        let found = metrics.sum("baton_kv_transfer_corrupt_frames_total");
        let unread = metrics.sum_where("baton_kv_transfer_frames_total", "duplicate");
        assert!(found <= flipped as f64, "{found} were found, {flipped} spoilt");
        if found + unread >= flipped as f64 { Ok(()) } else { Err(format!("{found} of {flipped}")) }
    })
    .await;
    let text = http::get(local.decode_http, "/metrics").await.expect("the node answers").text();
    let sender = format!("sender=\"prefill-{}\"", local.prefill_grpc);
    assert!(
        text.lines().any(|line| {
            line.starts_with("baton_kv_transfer_corrupt_frames_total") && line.contains(&sender)
        }),
        "no line for {sender}"
    );
    local.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flipped_bits_change_no_answer() {
    let _alone = alone().await;
    answers_over(KvTransport::Grpc).await;
    answers_over(KvTransport::Ucx).await;
}
