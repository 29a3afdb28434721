//! A sender over a link that carries so many bytes a second and no more, in simulated time: what
//! is sent behind frames must not wait for seconds, and the link must not idle.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_types::{
    Epoch, Incarnation, KvDtype, ModelFingerprint, NodeId, NumericsVersion, RequestId, TransferId,
};

use super::*;
use crate::frame::WireLayout;
use crate::grant::GrantMinter;
use crate::receiver::{Receiver, ReceiverAction, ReceiverConfig};

const LAYOUT: WireLayout =
    WireLayout { layers: 4, kv_heads: 8, head_dim: 128, dtype: KvDtype::Bf16 };
const TOKENS: u32 = 4_096;
const DEADLINE_MS: u64 = 600_000;

/// Messages one behind the other.
struct Pipe {
    bytes_per_ms: u64,
    room: u64,
    waiting: VecDeque<(u64, KvMessage)>,
}

impl Pipe {
    fn new(bytes_per_ms: u64) -> Self {
        Self { bytes_per_ms, room: 0, waiting: VecDeque::new() }
    }

    fn put(&mut self, message: KvMessage, now_ms: u64) {
        self.waiting.push_back((now_ms, message));
    }

    /// What arrives in this millisecond, each with when it was sent.
    fn arrivals(&mut self) -> Vec<(u64, KvMessage)> {
        self.room += self.bytes_per_ms;
        let mut arrived = Vec::new();
        while let Some((_, message)) = self.waiting.front() {
            let bytes = message.encode().len() as u64;
            if bytes > self.room {
                return arrived;
            }
            self.room -= bytes;
            arrived.extend(self.waiting.pop_front());
        }
        self.room = 0;
        arrived
    }
}

struct Outcome {
    took_ms: u64,
    /// Of heartbeats sent in the last third of the time.
    slowest_heartbeat_ms: u64,
    last_frame: usize,
    pace: Arc<LinkPace>,
}

/// `place_ms`: how long the receiver takes to place what came.
fn send_all(bytes_per_ms: u64, place_ms: u64) -> Outcome {
    let identity = SenderIdentity {
        node: NodeId::new("p"),
        incarnation: Incarnation(2),
        fingerprint: ModelFingerprint([4; 32]),
        numerics: NumericsVersion("n".into()),
    };
    let grant = Grant {
        transfer_id: TransferId([1; 16]),
        request_id: RequestId([2; 16]),
        epoch: Epoch(1),
        receiver: NodeId::new("d"),
        receiver_incarnation: Incarnation(1),
        sender_incarnation: identity.incarnation,
        tokens: TOKENS,
        cached_tokens: 0,
        unseen: 0..0,
        layout: LAYOUT,
        fingerprint: identity.fingerprint,
        numerics: identity.numerics.clone(),
        choices: 0,
        expiry_ms: 1_000,
    };
    let minter = Arc::new(GrantMinter::new([7; 32]));
    let config = ReceiverConfig::default();
    let (mut receiver, bytes) = Receiver::grant(config, minter, grant, 0, DEADLINE_MS);
    let mut sender =
        Sender::open(SenderConfig::default(), identity, bytes, 0, DEADLINE_MS).unwrap();
    let pace = Arc::new(LinkPace::default());
    sender.keep_pace(pace.clone());
    let (mut there, mut back) = (Pipe::new(bytes_per_ms), Pipe::new(bytes_per_ms));
    let mut layers = 0..LAYOUT.layers;
    let mut placing = VecDeque::new();
    let (mut heartbeats, mut last_frame) = (Vec::new(), 0);
    for now_ms in 0..DEADLINE_MS {
        if sender.wants_spans() {
            match layers.next() {
                Some(layer) => {
                    let payload = vec![0; TOKENS as usize * LAYOUT.token_layer_bytes()].into();
                    let span = KvSpan { layer, token_first: 0, token_count: TOKENS, payload };
                    sender.push_span(&span).unwrap();
                }
                None => sender.finish(CommitInfo {
                    first_tokens: vec![],
                    sampler_digest: [0; 32],
                    prompt_logprobs: vec![],
                    cached_tokens: 0,
                }),
            }
        }
        back.arrivals().into_iter().for_each(|(_, message)| sender.on_message(message, now_ms));
        if now_ms >= sender.next_tick_ms() {
            sender.tick(now_ms);
        }
        while let Some(action) = sender.next_action() {
            match action {
                SenderAction::Send(message) => there.put(message, now_ms),
                SenderAction::Done(_) => {
                    let late = heartbeats.iter().filter(|(sent, _)| sent * 3 > now_ms * 2);
                    let slowest = late.map(|(_, took)| *took).max();
                    return Outcome {
                        took_ms: now_ms,
                        slowest_heartbeat_ms: slowest.unwrap_or(0),
                        last_frame,
                        pace,
                    };
                }
                SenderAction::Failed(error) => panic!("after {now_ms} ms: {error}"),
            }
        }
        for (sent_ms, message) in there.arrivals() {
            match &message.body {
                Body::Heartbeat { .. } => heartbeats.push((sent_ms, now_ms - sent_ms)),
                Body::Frame(frame) => last_frame = frame.payload().len(),
                _ => {}
            }
            receiver.on_message(message, now_ms);
        }
        while placing.front().is_some_and(|(due_ms, _)| *due_ms <= now_ms) {
            let (_, key) = placing.pop_front().unwrap();
            receiver.placed(key, Ok(()), now_ms);
        }
        while let Some(action) = receiver.next_action() {
            match action {
                ReceiverAction::Send(message) => back.put(message, now_ms),
                ReceiverAction::Place(frame) => placing.push_back((now_ms + place_ms, frame.key())),
                ReceiverAction::Activate(_) => receiver.activated(Ok(()), now_ms),
                other => panic!("{other:?}"),
            }
        }
    }
    panic!("it never ends")
}

const ALL_BYTES: u64 = TOKENS as u64 * 4_096 * 4;

#[test]
fn a_slow_link_is_full_and_its_queue_is_short() {
    // 100 Mbit/s, 1 Gbit/s.
    for bytes_per_ms in [12_000, 120_000] {
        let outcome = send_all(bytes_per_ms, 0);
        let ideal_ms = ALL_BYTES / bytes_per_ms;
        assert!(outcome.took_ms <= ideal_ms * 11 / 10 + 50, "{} ms", outcome.took_ms);
        assert!(outcome.slowest_heartbeat_ms <= 250, "{} ms", outcome.slowest_heartbeat_ms);
    }
    let slow = send_all(12_000, 0);
    let known = slow.pace.bytes_per_s().expect("it was the limit");
    assert!((10e6..20e6).contains(&known), "{known}");
    assert_eq!(slow.last_frame, 1 << 20, "frames that were cut before stay as they are");
    // What the first transfer learnt, the next one begins with.
    assert_eq!(slow.pace.frame_bytes(), 64 << 10);
}

#[test]
fn a_receiver_that_is_slow_to_place_makes_no_link_slow() {
    for bytes_per_ms in [1_000_000, 10_000_000] {
        let outcome = send_all(bytes_per_ms, 400);
        assert_eq!(outcome.pace.bytes_per_s(), None);
        assert_eq!(outcome.last_frame, 1 << 20);
    }
}

/// Over UCX a heartbeat says nothing of frames, neither that they have arrived nor how fast.
#[test]
fn heartbeats_beside_the_frames_measure_nothing() {
    for (is_probed, known) in [(true, Some(196_804)), (false, None)] {
        let (pace, mut flow) = (LinkPace::default(), Flow::default());
        flow.begin(1 << 24, 0, is_probed);
        for sequence in 1..=2_u32 {
            flow.spent_bytes += 1 << 16;
            flow.probe(sequence, 333 * u64::from(sequence));
        }
        flow.probed(1, 1_000, &pace);
        flow.probed(2, 1_333, &pace);
        assert_eq!(pace.bytes_per_s().map(|known| known as u64), known);
    }
}
