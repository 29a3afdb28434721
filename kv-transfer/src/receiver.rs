//! The decode node's end of a transfer:
//! `Granted → Open → Receiving → Activating → Committed | Aborting → Free`.
//!
//! Sans-I/O: messages, results and times go in, [`ReceiverAction`]s come out of
//! [`Receiver::next_action`]. [`receive::drive`](crate::receive::drive) runs it over a stream.
//! Blocks belong to the caller; they may be reused once the machine is free and not before.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use baton_types::{Epoch, Error, Incarnation, NodeId};
use bytes::Bytes;

use crate::TransferError;
use crate::frame::{Frame, FrameKey};
use crate::grant::{Grant, GrantMinter, check_numerics};
use crate::message::{
    Body, CHECKSUM_CRC32C, Commit, Context, HeartbeatAck, KvMessage, Open, OpenAccepted,
    VERSION_MAX, VERSION_MIN,
};
use crate::timing::{Heard, Timing};

mod arrived;
mod states;
#[cfg(test)]
mod tests;

use arrived::Arrived;
use states::{Aborting, Granted, State};

/// Most ranges asked for again in one transfer; a link that loses more is given up.
pub const RESENDS_MAX: usize = 1024;

/// Bounds of one receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverConfig {
    pub timing: Timing,
    /// Payload bytes that may be on their way and not yet placed. At least one frame's, or
    /// nothing ever comes.
    pub window_bytes: u64,
    /// A sender may hold KV in another precision; it sends the granted one.
    pub kv_conversion: bool,
}

impl Default for ReceiverConfig {
    fn default() -> Self {
        Self { timing: Timing::default(), window_bytes: 16 << 20, kv_conversion: false }
    }
}

/// What whoever runs a receiver must do next.
#[derive(Clone, Debug, PartialEq)]
pub enum ReceiverAction {
    Send(KvMessage),
    /// Put this verified frame into its blocks, then call [`Receiver::placed`].
    Place(Frame),
    /// Everything is in place and fits: start decoding, then call [`Receiver::activated`].
    Activate(Box<Commit>),
    /// The peer that sent `Open` may not use this grant, which stays as it is for another. Send
    /// what was asked for, then close the stream.
    Refused(TransferError),
    /// Close the stream, then call [`Receiver::on_closed`].
    Close,
    /// Final: no write can follow. `Ok` where the transfer was committed.
    Free(Result<(), TransferError>),
}

/// What happened to everything that came, over all epochs of a grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameCounters {
    /// Accepted and placed, or being placed.
    pub frames: u64,
    /// Their payload.
    pub bytes: u64,
    /// Came again; no harm.
    pub duplicate: u64,
    /// Of another epoch, or after the end: refused.
    pub stale: u64,
    /// Of another transfer: refused.
    pub foreign: u64,
    /// Outside the grant, of another shape, or across other frames' borders: refused.
    pub outside: u64,
    /// The checksum did not fit, or the message could not be read.
    pub corrupt: u64,
    /// Ranges that were asked for again.
    pub resends: u64,
}

/// The state machine of one grant.
#[derive(Debug)]
pub struct Receiver {
    link: Link,
    state: State,
}

/// What every state shares.
#[derive(Debug)]
struct Link {
    config: ReceiverConfig,
    minter: Arc<GrantMinter>,
    grant: Grant,
    deadline_ms: u64,
    heard: Heard,
    actions: VecDeque<ReceiverAction>,
    counters: FrameCounters,
    /// Frames handed to the caller and not yet placed.
    placing: BTreeSet<FrameKey>,
    granted_bytes: u64,
    /// What the stream can do besides.
    offered: u32,
    /// Who opened the grant last.
    sender: Option<NodeId>,
    /// Whether that sender holds KV in another precision than the granted one.
    is_converted: bool,
    /// What of it the sender can do as well.
    features: u32,
}

impl Receiver {
    /// A grant that waits to be opened, and its bytes for the sender. `deadline_ms` is the
    /// request's, by the clock of `now_ms`, which must be the minter's.
    pub fn grant(
        config: ReceiverConfig,
        minter: Arc<GrantMinter>,
        grant: Grant,
        now_ms: u64,
        deadline_ms: u64,
    ) -> (Self, Bytes) {
        let bytes = minter.mint(&grant, now_ms);
        let expires_ms = now_ms.saturating_add(grant.expiry_ms);
        let link = Link {
            granted_bytes: config.window_bytes,
            config,
            minter,
            grant,
            deadline_ms,
            heard: Heard::now(now_ms),
            actions: VecDeque::new(),
            counters: FrameCounters::default(),
            placing: BTreeSet::new(),
            offered: 0,
            sender: None,
            is_converted: false,
            features: 0,
        };
        (Self { link, state: State::Granted(Granted { expires_ms }) }, bytes)
    }

    /// The same reservation for another attempt, under the next epoch: whatever still comes
    /// under the old one is refused. `None`, with nothing changed, where the machine is neither
    /// unopened nor free after a failure: it is in quarantine until the old stream is closed, or
    /// the commit has won.
    pub fn regrant(
        &mut self,
        sender_incarnation: Incarnation,
        now_ms: u64,
        deadline_ms: u64,
    ) -> Option<Bytes> {
        if !matches!(self.state, State::Granted(_) | State::Free { committed: false }) {
            return None;
        }
        let link = &mut self.link;
        link.grant.epoch = Epoch(link.grant.epoch.0 + 1);
        link.grant.sender_incarnation = sender_incarnation;
        link.deadline_ms = deadline_ms;
        link.granted_bytes = link.config.window_bytes;
        link.actions.clear();
        let expires_ms = now_ms.saturating_add(link.grant.expiry_ms);
        self.state = State::Granted(Granted { expires_ms });
        Some(self.link.minter.mint(&self.link.grant, now_ms))
    }

    pub fn current_grant(&self) -> &Grant {
        &self.link.grant
    }

    pub fn counters(&self) -> &FrameCounters {
        &self.link.counters
    }

    /// Who opened the grant; the last, where several did.
    pub fn sender(&self) -> Option<&NodeId> {
        self.link.sender.as_ref()
    }

    /// Whether the KV of whoever opened the grant last was converted on its way.
    pub fn is_converted(&self) -> bool {
        self.link.is_converted
    }

    /// Whether it still waits for an `Open`.
    pub fn is_granted(&self) -> bool {
        matches!(self.state, State::Granted(_))
    }

    /// Whether no write can follow any more.
    pub fn is_free(&self) -> bool {
        matches!(self.state, State::Free { .. })
    }

    /// Says what the stream can do besides, before its first message.
    pub(crate) fn offer(&mut self, features: u32) {
        self.link.offered = features;
    }

    /// A message from the sender.
    pub fn on_message(&mut self, message: KvMessage, now_ms: u64) {
        let KvMessage { context, body } = message;
        if context != self.link.context() {
            return self.refuse_stranger(context, &body);
        }
        self.link.heard = Heard::now(now_ms);
        match body {
            Body::Open(open) => self.step(|state, link| state.open(&open, now_ms, link)),
            Body::Frame(frame) => self.step(|state, link| state.frame(frame, now_ms, link)),
            Body::Commit(commit) => self.step(|state, link| state.commit(commit, now_ms, link)),
            Body::Heartbeat { sequence } => self.heartbeat(sequence),
            Body::Abort { code, message } => {
                let error = TransferError::PeerAborted { code, message };
                self.step(|state, link| state.aborted_by_peer(error, link));
            }
            // A sender says none of these.
            Body::OpenAccepted(_)
            | Body::Credit(_)
            | Body::Resend(_)
            | Body::Committed
            | Body::HeartbeatAck(_) => self.link.counters.foreign += 1,
        }
    }

    /// A message came that cannot be read; it is as good as lost.
    pub fn on_undecodable(&mut self) {
        self.link.counters.corrupt += 1;
    }

    /// The frame of a `Place` action is in its blocks, or could not be put there.
    ///
    /// # Panics
    /// Where no such frame was to be placed.
    pub fn placed(&mut self, key: FrameKey, result: Result<(), Error>, now_ms: u64) {
        assert!(self.link.placing.remove(&key), "frame ({key}) was not to be placed");
        match result {
            Ok(()) => {
                self.link.granted_bytes += key.payload_bytes(&self.link.grant.layout) as u64;
                self.step(|state, link| state.placed(key, now_ms, link));
            }
            Err(error) => self.abort(TransferError::Place(error), now_ms),
        }
        self.step(State::free_if_quiet);
    }

    /// Decoding has started after an `Activate`, or could not.
    ///
    /// # Panics
    /// Where no activation was asked for.
    pub fn activated(&mut self, result: Result<(), Error>, now_ms: u64) {
        self.step(|state, link| match state {
            State::Activating(activating) => activating.activated(result, now_ms, link),
            _ => panic!("no activation was asked for"),
        });
    }

    /// The stream has ended: nothing can come any more.
    pub fn on_closed(&mut self) {
        self.step(|state, link| state.closed(link));
    }

    /// Ends the transfer: the request is cancelled, or a later attempt fences this one. It is
    /// free at once where it was not opened, else when the stream is closed and nothing is being
    /// placed. Once activation has begun this has no effect: the commit has won.
    pub fn abort(&mut self, error: TransferError, now_ms: u64) {
        self.step(|state, link| match state {
            State::Granted(_) => link.free(Err(error)),
            State::Open(_) | State::Receiving(_) => Aborting::begin(error, now_ms, link),
            ended => ended,
        });
    }

    /// The driver asked to be woken at `due_ms`: what it is late was no silence of the peer's.
    pub(crate) fn woken(&mut self, due_ms: u64, now_ms: u64) {
        self.link.heard.woken(due_ms, now_ms, self.link.config.timing.peer_silent_ms);
    }

    /// Time has passed: expiry, silence, deadline, gaps.
    pub fn tick(&mut self, now_ms: u64) {
        self.step(|state, link| state.tick(now_ms, link));
    }

    /// When `tick` is due next.
    pub fn next_tick_ms(&self) -> u64 {
        self.state.next_tick_ms(&self.link)
    }

    pub fn next_action(&mut self) -> Option<ReceiverAction> {
        self.link.actions.pop_front()
    }

    fn step(&mut self, transition: impl FnOnce(State, &mut Link) -> State) {
        let state = std::mem::replace(&mut self.state, State::Free { committed: false });
        self.state = transition(state, &mut self.link);
    }

    fn refuse_stranger(&mut self, context: Context, body: &Body) {
        let link = &mut self.link;
        if context.transfer_id != link.grant.transfer_id {
            link.counters.foreign += 1;
            return;
        }
        link.counters.stale += 1;
        if matches!(body, Body::Open(_)) && self.is_granted() {
            self.link.refuse(context, TransferError::Superseded);
        }
    }

    fn heartbeat(&mut self, sequence: u32) {
        let (has_commit, committed) = match &self.state {
            State::Open(_) => {
                // Nothing proves yet that the sender has seen the acceptance.
                self.link.send_accepted();
                (false, false)
            }
            State::Receiving(receiving) => (receiving.arrived.commit.is_some(), false),
            State::Activating(_) => (true, false),
            State::Committed(_) => (true, true),
            State::Granted(_) | State::Aborting(_) | State::Free { .. } => return,
        };
        let granted_bytes = self.link.granted_bytes;
        let ack = HeartbeatAck { sequence, granted_bytes, has_commit, committed };
        self.link.send(Body::HeartbeatAck(ack));
    }
}

impl Link {
    fn context(&self) -> Context {
        Context { transfer_id: self.grant.transfer_id, epoch: self.grant.epoch }
    }

    fn send(&mut self, body: Body) {
        let context = self.context();
        self.actions.push_back(ReceiverAction::Send(KvMessage { context, body }));
    }

    fn send_accepted(&mut self) {
        let granted_bytes = self.granted_bytes;
        let accepted =
            OpenAccepted { version: VERSION_MAX, features: self.features, granted_bytes };
        self.send(Body::OpenAccepted(accepted));
    }

    /// Sends a stranger away; `context` is the stranger's own.
    fn refuse(&mut self, context: Context, error: TransferError) {
        let body = Body::Abort { code: error.code(), message: error.to_string() };
        self.actions.push_back(ReceiverAction::Send(KvMessage { context, body }));
        self.actions.push_back(ReceiverAction::Refused(error));
    }

    fn check_open(&self, open: &Open, now_ms: u64) -> Result<(), TransferError> {
        let shown = self.minter.verify(&open.grant, now_ms)?;
        let grant = &self.grant;
        if shown.epoch != grant.epoch {
            return Err(TransferError::Superseded);
        }
        if open.version_min > VERSION_MAX || open.version_max < VERSION_MIN {
            let (min, max) = (open.version_min, open.version_max);
            return Err(TransferError::Version { min, max });
        }
        let fields = [
            ("grant", grant.transfer_id.to_string(), shown.transfer_id.to_string()),
            (
                "receiver incarnation",
                grant.receiver_incarnation.to_string(),
                shown.receiver_incarnation.to_string(),
            ),
            (
                "sender incarnation",
                grant.sender_incarnation.to_string(),
                open.sender_incarnation.to_string(),
            ),
            ("fingerprint", grant.fingerprint.to_string(), open.fingerprint.to_string()),
            ("layout", format!("{:?}", grant.layout), format!("{:?}", open.layout)),
            ("checksum", CHECKSUM_CRC32C.to_string(), open.checksum.to_string()),
        ];
        match fields.into_iter().find(|(_, granted, peer)| granted != peer) {
            Some((what, granted, peer)) => Err(TransferError::Mismatch { what, granted, peer }),
            None => check_numerics(&grant.numerics, &open.numerics, self.config.kv_conversion),
        }
    }

    fn free(&mut self, outcome: Result<(), TransferError>) -> State {
        let committed = outcome.is_ok();
        self.actions.push_back(ReceiverAction::Free(outcome));
        State::Free { committed }
    }

    fn silent_from_ms(&self) -> u64 {
        self.heard.at_ms + self.config.timing.peer_silent_ms
    }

    fn overdue(&self, now_ms: u64) -> Option<TransferError> {
        if now_ms >= self.deadline_ms {
            return Some(TransferError::DeadlinePassed);
        }
        let silent_ms = now_ms.saturating_sub(self.heard.at_ms);
        (now_ms >= self.silent_from_ms()).then_some(TransferError::PeerSilent { silent_ms })
    }
}
