//! The prefill node's end of a transfer: `Opening → Sending → Committing → Done | Aborting`.
//!
//! Sans-I/O: spans, messages and times go in, [`SenderAction`]s come out of
//! [`Sender::next_action`]. [`send::drive`](crate::send::drive) runs it over a stream.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_types::{ErrorCode, Incarnation, ModelFingerprint, NodeId, NumericsVersion};
use bytes::Bytes;

use crate::TransferError;
use crate::digest::FrameDigest;
use crate::frame::{Frame, FrameKey, PAYLOAD_MAX_BYTES};
use crate::grant::{Grant, check_numerics};
use crate::memory::FrameMemory;
use crate::message::{
    Body, CHECKSUM_CRC32C, Commit, CommitInfo, Context, HeartbeatAck, KvMessage, Open, VERSION_MAX,
    VERSION_MIN,
};
use crate::pace::LinkPace;
use crate::split::{KvSpan, split_span};
use crate::timing::{Heard, Timing};

mod flow;
#[cfg(test)]
mod narrow_link;
mod states;

use flow::Flow;
use states::{Aborting, Opening, Sending, State};

/// Who sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SenderIdentity {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub fingerprint: ModelFingerprint,
    pub numerics: NumericsVersion,
}

/// Bounds of one sender, and where its frames lie.
#[derive(Clone, Debug)]
pub struct SenderConfig {
    pub timing: Timing,
    /// Most payload bytes of a frame, at most [`PAYLOAD_MAX_BYTES`].
    pub frame_max_bytes: usize,
    /// With so many bytes held back no more spans are wanted.
    pub queue_max_bytes: usize,
    pub memory: FrameMemory,
    /// A grant for another precision of KV may be used; spans then come in the granted one.
    pub kv_conversion: bool,
}

impl Default for SenderConfig {
    fn default() -> Self {
        Self {
            timing: Timing::default(),
            frame_max_bytes: PAYLOAD_MAX_BYTES,
            queue_max_bytes: 64 << 20,
            memory: FrameMemory::heap(),
            kv_conversion: false,
        }
    }
}

/// What whoever runs a sender must do next.
#[derive(Clone, Debug, PartialEq)]
pub enum SenderAction {
    Send(KvMessage),
    /// The receiver has everything in place: the source blocks are free to go. Final.
    Done(SenderReport),
    /// Nothing more will be written. The stream is to be closed. Final.
    Failed(TransferError),
}

/// What a transfer took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderReport {
    pub frames: u64,
    /// Payload, frames sent again included.
    pub bytes: u64,
    pub resent_frames: u64,
    /// Messages of another transfer or epoch.
    pub foreign_messages: u64,
}

/// The state machine of one transfer.
#[derive(Debug)]
pub struct Sender {
    link: Link,
    state: State,
}

/// What every state shares.
#[derive(Debug)]
struct Link {
    config: SenderConfig,
    grant: Grant,
    deadline_ms: u64,
    actions: VecDeque<SenderAction>,
    report: SenderReport,
    heard: Heard,
    next_heartbeat_ms: u64,
    heartbeat_sequence: u32,
    flow: Flow,
    pace: Arc<LinkPace>,
}

impl Sender {
    /// Begins a transfer under a grant; the first action is to send `Open`. `deadline_ms` is the
    /// request's, by the clock of `now_ms`.
    ///
    /// # Errors
    /// `Grant` where the bytes are none, `Mismatch` or `KvPrecision` where it is not for this node,
    /// its model or its arithmetic: nothing needs to be sent then.
    ///
    /// # Panics
    /// Where `config.frame_max_bytes` exceeds [`PAYLOAD_MAX_BYTES`].
    pub fn open(
        config: SenderConfig,
        identity: SenderIdentity,
        grant_bytes: Bytes,
        now_ms: u64,
        deadline_ms: u64,
    ) -> Result<Self, TransferError> {
        assert!(config.frame_max_bytes <= PAYLOAD_MAX_BYTES, "frame_max_bytes");
        let grant = Grant::read(&grant_bytes)?;
        for (what, granted, own) in [
            ("incarnation", grant.sender_incarnation.to_string(), identity.incarnation.to_string()),
            ("fingerprint", grant.fingerprint.to_string(), identity.fingerprint.to_string()),
        ] {
            if granted != own {
                return Err(TransferError::Mismatch { what, granted, peer: own });
            }
        }
        check_numerics(&grant.numerics, &identity.numerics, config.kv_conversion)?;
        let open = Open {
            grant: grant_bytes,
            sender: identity.node,
            sender_incarnation: identity.incarnation,
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: 0,
            checksum: CHECKSUM_CRC32C,
            layout: grant.layout,
            fingerprint: identity.fingerprint,
            numerics: identity.numerics,
        };
        let mut link = Link {
            next_heartbeat_ms: now_ms + config.timing.heartbeat_ms,
            config,
            grant,
            deadline_ms,
            actions: VecDeque::new(),
            report: SenderReport::default(),
            heard: Heard::now(now_ms),
            heartbeat_sequence: 0,
            flow: Flow::default(),
            pace: Arc::default(),
        };
        link.send(Body::Open(Box::new(open)));
        Ok(Self { link, state: State::Opening(Opening { commit: None }) })
    }

    /// Takes over what is known of the way to the receiver.
    pub fn keep_pace(&mut self, pace: Arc<LinkPace>) {
        self.link.pace = pace;
    }

    /// There is a stream, which offers `features` besides: before `Open` is taken from the
    /// actions. From now on the receiver may be silent.
    pub(crate) fn connected(&mut self, features: u32, now_ms: u64) {
        self.link.heard = Heard::now(now_ms);
        if let Some(SenderAction::Send(KvMessage { body: Body::Open(open), .. })) =
            self.link.actions.front_mut()
        {
            open.features = features;
        }
    }

    /// What the receiver wants; layout and leading tokens to leave out are in it.
    pub fn grant(&self) -> &Grant {
        &self.link.grant
    }

    /// Payload bytes that wait for credit.
    pub fn queued_bytes(&self) -> usize {
        self.link.flow.queued_bytes
    }

    /// Whether the next span should be handed in now; while not, hold it back at its source.
    pub fn wants_spans(&self) -> bool {
        self.link.flow.queued_bytes < self.link.config.queue_max_bytes && self.accepts_spans()
    }

    /// Whether its final action has been queued or yielded.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Whether it has ended or given up.
    pub fn is_ending(&self) -> bool {
        matches!(self.state, State::Done | State::Aborting(_))
    }

    /// Hands in KV of consecutive tokens of a layer, in any order, each (layer, token) once.
    /// Leading tokens that the receiver holds are left out. A transfer that has ended ignores it.
    ///
    /// # Errors
    /// `Span` where it does not fit the grant; the caller should `abort`.
    pub fn push_span(&mut self, span: &KvSpan) -> Result<(), TransferError> {
        if !self.accepts_spans() {
            return Ok(());
        }
        self.link.queue_span(span)?;
        if matches!(self.state, State::Sending(_)) {
            self.link.send_under_credit();
        }
        Ok(())
    }

    /// All spans have been handed in; this goes with the last message.
    pub fn finish(&mut self, info: CommitInfo) {
        self.step(|state, link| match state {
            State::Opening(_) => State::Opening(Opening { commit: Some(info) }),
            State::Sending(_) => Sending { commit: Some(info) }.advance(link),
            ended => ended,
        });
    }

    /// A message from the receiver.
    pub fn on_message(&mut self, message: KvMessage, now_ms: u64) {
        if message.context != self.link.context() {
            self.link.report.foreign_messages += 1;
            return;
        }
        self.link.heard = Heard::now(now_ms);
        match message.body {
            Body::OpenAccepted(accepted) => self.step(|state, link| match state {
                State::Opening(opening) => opening.accepted(&accepted, link),
                other => other,
            }),
            Body::Credit(credit) => {
                self.link.flow.retained.remove(&credit.placed);
                self.credit(credit.granted_bytes);
            }
            Body::Resend(range) => self.link.resend(&range),
            Body::Committed => self.committed(),
            Body::HeartbeatAck(ack) => {
                self.link.flow.probed(ack.sequence, now_ms, &self.link.pace);
                self.acknowledged(&ack);
            }
            Body::Abort { code, message } => self.aborted_by_peer(code, message),
            // A receiver says none of these.
            Body::Open(_) | Body::Frame(_) | Body::Commit(_) | Body::Heartbeat { .. } => {
                self.link.report.foreign_messages += 1;
            }
        }
    }

    /// The stream has ended; nothing can be sent any more.
    pub fn on_closed(&mut self) {
        self.step(|state, link| match state {
            State::Done => State::Done,
            State::Aborting(aborting) => link.failed(aborting.error),
            _ => link.failed(TransferError::Closed),
        });
    }

    /// Gives up; the receiver is told.
    pub fn abort(&mut self, error: TransferError, now_ms: u64) {
        self.step(|state, link| match state {
            State::Done | State::Aborting(_) => state,
            _ => Aborting::begin(error, now_ms, link),
        });
    }

    /// The driver asked to be woken at `due_ms`: what it is late was no silence of the peer's.
    pub(crate) fn woken(&mut self, due_ms: u64, now_ms: u64) {
        self.link.heard.woken(due_ms, now_ms, self.link.config.timing.peer_silent_ms);
    }

    /// Time has passed: heartbeats, silence, deadline.
    pub fn tick(&mut self, now_ms: u64) {
        self.step(|state, link| match state {
            State::Done => State::Done,
            State::Aborting(aborting) => aborting.tick(now_ms, link),
            running => match link.overdue(now_ms) {
                Some(error) => Aborting::begin(error, now_ms, link),
                None => running,
            },
        });
        if !self.is_ending() {
            self.link.heartbeat(now_ms);
        }
    }

    /// When `tick` is due next.
    pub fn next_tick_ms(&self) -> u64 {
        match &self.state {
            State::Done => u64::MAX,
            State::Aborting(aborting) => aborting.until_ms,
            _ => self.link.next_tick_ms(),
        }
    }

    pub fn next_action(&mut self) -> Option<SenderAction> {
        self.link.actions.pop_front()
    }

    fn accepts_spans(&self) -> bool {
        match &self.state {
            State::Opening(opening) => opening.commit.is_none(),
            State::Sending(sending) => sending.commit.is_none(),
            _ => false,
        }
    }

    fn step(&mut self, transition: impl FnOnce(State, &mut Link) -> State) {
        let state = std::mem::replace(&mut self.state, State::Done);
        self.state = transition(state, &mut self.link);
    }

    fn credit(&mut self, granted_bytes: u64) {
        let flow = &mut self.link.flow;
        flow.granted_bytes = flow.granted_bytes.max(granted_bytes);
        self.step(|state, link| match state {
            State::Sending(sending) => sending.advance(link),
            other => other,
        });
    }

    fn committed(&mut self) {
        self.step(|state, link| match state {
            State::Committing(_) => link.done(),
            other => other,
        });
    }

    fn acknowledged(&mut self, ack: &HeartbeatAck) {
        self.credit(ack.granted_bytes);
        if ack.committed {
            self.committed();
        } else if let State::Committing(committing) = &mut self.state {
            committing.repeat_if_lost(ack, &mut self.link);
        }
    }

    fn aborted_by_peer(&mut self, code: ErrorCode, message: String) {
        self.step(|state, link| match state {
            State::Done => State::Done,
            State::Aborting(aborting) => link.failed(aborting.error),
            _ => {
                let error = TransferError::PeerAborted { code, message };
                link.send_abort(&error);
                link.failed(error)
            }
        });
    }
}

impl Link {
    fn context(&self) -> Context {
        Context { transfer_id: self.grant.transfer_id, epoch: self.grant.epoch }
    }

    fn send(&mut self, body: Body) {
        let context = self.context();
        self.actions.push_back(SenderAction::Send(KvMessage { context, body }));
    }

    fn send_abort(&mut self, error: &TransferError) {
        self.send(Body::Abort { code: error.code(), message: error.to_string() });
    }

    fn queue_span(&mut self, span: &KvSpan) -> Result<(), TransferError> {
        let grant = &self.grant;
        let want = span.token_count as usize * grant.layout.token_layer_bytes();
        let end = u64::from(span.token_first) + u64::from(span.token_count);
        let fits = span.layer < grant.layout.layers
            && end <= u64::from(grant.tokens)
            && span.payload.len() == want;
        if !fits {
            return Err(TransferError::Span(format!(
                "layer {}, tokens {}+{}, {} bytes; {} layers and {} tokens are granted, and so \
                 many tokens take {want} bytes",
                span.layer,
                span.token_first,
                span.token_count,
                span.payload.len(),
                grant.layout.layers,
                grant.tokens
            )));
        }
        let first = span.token_first.max(grant.cached_tokens);
        let (transfer_id, epoch) = (grant.transfer_id, grant.epoch);
        let most = self.config.frame_max_bytes.min(self.pace.frame_bytes());
        let memory = &self.config.memory;
        for frame in split_span(span, first, &grant.layout, transfer_id, epoch, most, memory) {
            self.flow.digest.add(frame.header());
            self.flow.queued_bytes += frame.payload().len();
            self.flow.queue.push_back(frame);
        }
        Ok(())
    }

    fn send_under_credit(&mut self) {
        while let Some(frame) = self.flow.next_under_credit(self.pace.window_bytes()) {
            self.send_frame(frame);
        }
    }

    fn send_frame(&mut self, frame: Frame) {
        self.report.frames += 1;
        self.report.bytes += frame.payload().len() as u64;
        self.actions.push_back(SenderAction::Send(KvMessage::frame(frame)));
    }

    /// Each frame is sent again at most once: the receiver gives up when that was not enough.
    fn resend(&mut self, range: &FrameKey) {
        let again: Vec<Frame> = self
            .flow
            .retained
            .values_mut()
            .filter(|(frame, resent)| !resent && frame.key().intersects(range))
            .map(|(frame, resent)| {
                *resent = true;
                frame.clone()
            })
            .collect();
        self.report.resent_frames += again.len() as u64;
        again.into_iter().for_each(|frame| self.send_frame(frame));
    }

    fn overdue(&self, now_ms: u64) -> Option<TransferError> {
        let silent_ms = now_ms.saturating_sub(self.heard.at_ms);
        if now_ms >= self.deadline_ms {
            return Some(TransferError::DeadlinePassed);
        }
        (silent_ms >= self.config.timing.peer_silent_ms)
            .then_some(TransferError::PeerSilent { silent_ms })
    }

    fn heartbeat(&mut self, now_ms: u64) {
        if now_ms >= self.next_heartbeat_ms {
            self.next_heartbeat_ms = now_ms + self.config.timing.heartbeat_ms;
            self.heartbeat_sequence += 1;
            let sequence = self.heartbeat_sequence;
            self.flow.probe(sequence, now_ms);
            self.send(Body::Heartbeat { sequence });
        }
    }

    fn next_tick_ms(&self) -> u64 {
        let silent_ms = self.heard.at_ms + self.config.timing.peer_silent_ms;
        self.deadline_ms.min(silent_ms).min(self.next_heartbeat_ms)
    }

    fn done(&mut self) -> State {
        self.flow.retained.clear();
        self.actions.push_back(SenderAction::Done(self.report));
        State::Done
    }

    fn failed(&mut self, error: TransferError) -> State {
        self.flow = Flow::default();
        self.actions.push_back(SenderAction::Failed(error));
        State::Done
    }
}

fn commit_of(info: CommitInfo, digest: &FrameDigest) -> Commit {
    Commit { info, frame_count: digest.frames(), digest: digest.to_bytes() }
}
