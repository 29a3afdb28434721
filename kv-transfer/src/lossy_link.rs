//! Sender and receiver over a link that drops, repeats, reorders, delays and corrupts, in
//! simulated time, from a seed.

use std::collections::HashMap;
use std::sync::Arc;

use baton_types::{
    Epoch, Incarnation, KvDtype, ModelFingerprint, NodeId, NumericsVersion, RequestId, TokenOutput,
    TransferId,
};
use bytes::Bytes;

use crate::frame::{Frame, FrameKey, WireLayout};
use crate::grant::{Grant, GrantMinter};
use crate::memory::FrameMemory;
use crate::message::{CommitInfo, KvMessage};
use crate::receiver::{Receiver, ReceiverAction, ReceiverConfig};
use crate::sender::{Sender, SenderAction, SenderConfig, SenderIdentity, SenderReport};
use crate::{KvSpan, TransferError};

mod tests;

pub(crate) const DEADLINE_MS: u64 = 4000;
pub(crate) const LAYOUT: WireLayout =
    WireLayout { layers: 3, kv_heads: 3, head_dim: 4, dtype: KvDtype::F16 };

/// xorshift64*: enough to scatter faults.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }

    fn hits(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// What a link does to a message, in percent of messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) drop: u64,
    pub(crate) repeat: u64,
    pub(crate) corrupt: u64,
    /// Messages of this run's past (another epoch, another transfer) mixed in.
    pub(crate) inject: u64,
    /// Each message takes up to so long, so they overtake one another.
    pub(crate) delay_max_ms: u64,
}

/// One direction.
#[derive(Default)]
struct Link {
    faults: Faults,
    in_flight: Vec<(u64, Bytes)>,
    closed: bool,
}

impl Link {
    fn send(&mut self, bytes: Bytes, now_ms: u64, random: &mut Random) {
        let copies = 1 + usize::from(random.hits(self.faults.repeat));
        for _ in 0..copies {
            if random.hits(self.faults.drop) {
                continue;
            }
            let mut bytes = bytes.clone();
            if random.hits(self.faults.corrupt) {
                let mut changed = bytes.to_vec();
                let at = random.below(changed.len() as u64) as usize;
                changed[at] ^= 1 << random.below(8);
                bytes = changed.into();
            }
            let at_ms = now_ms + random.below(self.faults.delay_max_ms + 1);
            self.in_flight.push((at_ms, bytes));
        }
    }

    /// In order of arrival; those that arrive together keep the order of sending.
    fn arrivals(&mut self, now_ms: u64) -> Vec<Bytes> {
        let (mut due, later): (Vec<_>, Vec<_>) =
            self.in_flight.drain(..).partition(|(at_ms, _)| *at_ms <= now_ms);
        self.in_flight = later;
        due.sort_by_key(|(at_ms, _)| *at_ms);
        due.into_iter().map(|(_, bytes)| bytes).collect()
    }

    fn is_over(&self) -> bool {
        self.closed && self.in_flight.is_empty()
    }
}

/// How one run is set up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) faults: Faults,
    pub(crate) tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) frame_max_bytes: usize,
    pub(crate) window_bytes: u64,
    /// A stopped process: says nothing and closes nothing.
    pub(crate) sender_stops_ms: Option<u64>,
    pub(crate) receiver_stops_ms: Option<u64>,
}

/// Both ends, the links between them, and the receiver's memory.
pub(crate) struct World {
    setup: Setup,
    random: Random,
    now_ms: u64,
    sender: Sender,
    receiver: Receiver,
    to_receiver: Link,
    to_sender: Link,
    spans: Vec<KvSpan>,
    finish: Option<CommitInfo>,
    placing: Vec<(u64, FrameKey)>,
    /// Bytes by (layer, K or V, head, token).
    memory: HashMap<(u16, u16, u16, u32), Vec<u8>>,
    pub(crate) sender_end: Option<Result<SenderReport, TransferError>>,
    pub(crate) receiver_end: Option<Result<(), TransferError>>,
    pub(crate) activated: bool,
    /// Under an older epoch and a foreign transfer, to be injected.
    strangers: Vec<Bytes>,
}

pub(crate) fn grant(setup: &Setup) -> Grant {
    Grant {
        transfer_id: TransferId([5; 16]),
        request_id: RequestId([6; 16]),
        epoch: Epoch(2),
        receiver: NodeId::new("decode-0"),
        receiver_incarnation: Incarnation(8),
        sender_incarnation: Incarnation(9),
        tokens: setup.tokens,
        cached_tokens: setup.cached_tokens,
        unseen: 0..0,
        layout: LAYOUT,
        fingerprint: ModelFingerprint([1; 32]),
        numerics: NumericsVersion("n".into()),
        choices: 1,
        expiry_ms: 1000,
    }
}

pub(crate) fn identity() -> SenderIdentity {
    SenderIdentity {
        node: NodeId::new("prefill-0"),
        incarnation: Incarnation(9),
        fingerprint: ModelFingerprint([1; 32]),
        numerics: NumericsVersion("n".into()),
    }
}

pub(crate) fn commit_info() -> CommitInfo {
    CommitInfo {
        first_tokens: vec![TokenOutput { choice: 0, index: 0, id: 42, logprobs: None }],
        sampler_digest: [3; 32],
        prompt_logprobs: Vec::new(),
        cached_tokens: 0,
    }
}

/// `row[head_dim]` of one token: a function of its place alone.
fn row(layer: u16, half: u16, head: u16, token: u32) -> Vec<u8> {
    let mut random =
        Random::new(u64::from(layer) << 48 | u64::from(half * 8 + head) << 32 | u64::from(token));
    (0..LAYOUT.half_bytes()).map(|_| random.below(256) as u8).collect()
}

pub(crate) fn span(layer: u16, token_first: u32, token_count: u32) -> KvSpan {
    let mut payload = Vec::new();
    for half in 0..2 {
        for head in 0..LAYOUT.kv_heads {
            for token in token_first..token_first + token_count {
                payload.extend(row(layer, half, head, token));
            }
        }
    }
    KvSpan { layer, token_first, token_count, payload: payload.into() }
}

/// Chunks of a prompt, each through all layers, as a prefill yields them.
pub(crate) fn prompt_spans(tokens: u32, random: &mut Random) -> Vec<KvSpan> {
    let mut spans = Vec::new();
    let mut first = 0;
    while first < tokens {
        let count = (1 + random.below(20) as u32).min(tokens - first);
        spans.extend((0..LAYOUT.layers).map(|layer| span(layer, first, count)));
        first += count;
    }
    spans
}

impl World {
    pub(crate) fn new(setup: Setup) -> Self {
        let mut random = Random::new(setup.seed);
        let config =
            ReceiverConfig { window_bytes: setup.window_bytes, ..ReceiverConfig::default() };
        let minter = Arc::new(GrantMinter::new([7; 32]));
        let (receiver, bytes) = Receiver::grant(config, minter, grant(&setup), 0, DEADLINE_MS);
        let sender_config = SenderConfig {
            frame_max_bytes: setup.frame_max_bytes,
            queue_max_bytes: 4096,
            ..SenderConfig::default()
        };
        let sender = Sender::open(sender_config, identity(), bytes, 0, DEADLINE_MS).unwrap();
        let mut spans = prompt_spans(setup.tokens, &mut random);
        spans.reverse();
        let link = || Link { faults: setup.faults, ..Link::default() };
        Self {
            setup,
            random,
            now_ms: 0,
            sender,
            receiver,
            to_receiver: link(),
            to_sender: link(),
            spans,
            finish: Some(commit_info()),
            placing: Vec::new(),
            memory: HashMap::new(),
            sender_end: None,
            receiver_end: None,
            activated: false,
            strangers: Vec::new(),
        }
    }

    /// Runs until both ends are done, at most some seconds past the deadline.
    pub(crate) fn run(mut self) -> Self {
        while self.now_ms < DEADLINE_MS + 3000 && !self.is_over() {
            self.step_sender();
            self.step_receiver();
            self.now_ms += 1;
        }
        self
    }

    pub(crate) fn counters(&self) -> crate::receiver::FrameCounters {
        *self.receiver.counters()
    }

    fn is_over(&self) -> bool {
        let stopped = |at: Option<u64>| at.is_some_and(|at_ms| self.now_ms >= at_ms);
        (self.sender_end.is_some() || stopped(self.setup.sender_stops_ms))
            && (self.receiver_end.is_some() || stopped(self.setup.receiver_stops_ms))
    }

    fn step_sender(&mut self) {
        let stopped = self.setup.sender_stops_ms.is_some_and(|at_ms| self.now_ms >= at_ms);
        if stopped || self.sender_end.is_some() {
            return;
        }
        for bytes in self.to_sender.arrivals(self.now_ms) {
            if let Ok(message) = KvMessage::decode(bytes) {
                self.sender.on_message(message, self.now_ms);
            }
        }
        if self.to_sender.is_over() {
            self.sender.on_closed();
        }
        if self.sender.wants_spans() && self.random.hits(50) {
            match self.spans.pop() {
                Some(span) => self.sender.push_span(&span).unwrap(),
                None => self.finish.take().into_iter().for_each(|info| self.sender.finish(info)),
            }
        }
        if self.now_ms >= self.sender.next_tick_ms() {
            self.sender.tick(self.now_ms);
        }
        while let Some(action) = self.sender.next_action() {
            match action {
                SenderAction::Send(message) => self.send_to_receiver(message),
                SenderAction::Done(report) => self.sender_end = Some(Ok(report)),
                SenderAction::Failed(error) => self.sender_end = Some(Err(error)),
            }
        }
        self.to_receiver.closed |= self.sender_end.is_some();
    }

    fn send_to_receiver(&mut self, message: KvMessage) {
        let heap = FrameMemory::heap();
        let mut old = message.clone();
        if let crate::message::Body::Frame(frame) = &old.body {
            let mut header = *frame.header();
            header.epoch = Epoch(1);
            let garbage = vec![0xEE; frame.payload().len()];
            old = KvMessage::frame(Frame::build(header, &heap, |out| out.put_slice(&garbage)));
        } else {
            old.context.epoch = Epoch(1);
        }
        self.strangers.push(old.encode());
        if let crate::message::Body::Frame(frame) = &old.body {
            let header = crate::frame::FrameHeader {
                transfer_id: TransferId([0xAA; 16]),
                epoch: Epoch(2),
                ..*frame.header()
            };
            let foreign = Frame::build(header, &heap, |out| out.put_slice(frame.payload()));
            self.strangers.push(KvMessage::frame(foreign).encode());
        }
        self.to_receiver.send(message.encode(), self.now_ms, &mut self.random);
        if self.random.hits(self.setup.faults.inject) {
            let at = self.random.below(self.strangers.len() as u64) as usize;
            let stranger = self.strangers[at].clone();
            self.to_receiver.send(stranger, self.now_ms, &mut self.random);
        }
    }

    fn step_receiver(&mut self) {
        let stopped = self.setup.receiver_stops_ms.is_some_and(|at_ms| self.now_ms >= at_ms);
        if stopped || self.receiver_end.is_some() {
            return;
        }
        for bytes in self.to_receiver.arrivals(self.now_ms) {
            match KvMessage::decode(bytes) {
                Ok(message) => self.receiver.on_message(message, self.now_ms),
                Err(_) => self.receiver.on_undecodable(),
            }
        }
        if self.to_receiver.is_over() {
            self.receiver.on_closed();
        }
        let (due, later): (Vec<_>, Vec<_>) =
            self.placing.drain(..).partition(|(at_ms, _)| *at_ms <= self.now_ms);
        self.placing = later;
        for (_, key) in due {
            self.receiver.placed(key, Ok(()), self.now_ms);
        }
        if self.now_ms >= self.receiver.next_tick_ms() {
            self.receiver.tick(self.now_ms);
        }
        while let Some(action) = self.receiver.next_action() {
            self.act(action);
        }
        let placing: usize = self.placing.iter().map(|(_, key)| key.payload_bytes(&LAYOUT)).sum();
        assert!(placing as u64 <= self.setup.window_bytes, "the credit was exceeded");
        self.to_sender.closed |= self.receiver_end.is_some();
    }

    fn act(&mut self, action: ReceiverAction) {
        match action {
            ReceiverAction::Send(message) => {
                self.to_sender.send(message.encode(), self.now_ms, &mut self.random);
            }
            ReceiverAction::Place(frame) => {
                assert_eq!(frame.header().epoch, Epoch(2), "a stale write was accepted");
                self.write(&frame);
                let done_ms = self.now_ms + self.random.below(4);
                self.placing.push((done_ms, frame.key()));
            }
            ReceiverAction::Activate(commit) => {
                assert_eq!(commit.info, commit_info());
                assert!(self.placing.is_empty());
                self.check_memory();
                self.activated = true;
                self.receiver.activated(Ok(()), self.now_ms);
            }
            // An injected `Open` came before the real one; a real driver would end that stream.
            ReceiverAction::Refused(error) => assert_eq!(error, TransferError::Superseded),
            ReceiverAction::Close => {
                self.to_receiver = Link { closed: true, ..Link::default() };
                self.to_sender.closed = true;
                self.receiver.on_closed();
            }
            ReceiverAction::Free(outcome) => {
                assert!(self.placing.is_empty(), "free while a frame is being placed");
                self.receiver_end = Some(outcome);
            }
        }
    }

    fn write(&mut self, frame: &Frame) {
        let key = frame.key();
        let mut rows = frame.payload().chunks_exact(LAYOUT.half_bytes());
        for half in 0..2 {
            for head in key.head_first..key.head_first + key.head_count {
                for token in key.token_first..key.token_first + key.token_count {
                    let place = (key.layer, half, head, token);
                    let old = self.memory.insert(place, rows.next().unwrap().to_vec());
                    assert!(old.is_none(), "{key} was placed twice");
                }
            }
        }
    }

    fn check_memory(&self) {
        let tokens = self.setup.cached_tokens..self.setup.tokens;
        for (&(layer, half, head, token), bytes) in &self.memory {
            assert!(tokens.contains(&token));
            assert_eq!(bytes, &row(layer, half, head, token));
        }
        let heads = usize::from(LAYOUT.kv_heads) * 2;
        assert_eq!(self.memory.len(), tokens.len() * heads * usize::from(LAYOUT.layers));
    }
}
