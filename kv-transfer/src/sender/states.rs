//! The sender's states; each transition consumes one and yields the next.

use super::{Link, commit_of};
use crate::TransferError;
use crate::message::{
    Body, Commit, CommitInfo, FEATURE_UCX, HeartbeatAck, OpenAccepted, VERSION_MAX, VERSION_MIN,
};

#[derive(Debug)]
pub(super) enum State {
    Opening(Opening),
    Sending(Sending),
    Committing(Committing),
    Aborting(Aborting),
    Done,
}

/// `Open` is out; spans are queued.
#[derive(Debug)]
pub(super) struct Opening {
    /// Set when all spans came before the receiver's answer.
    pub(super) commit: Option<CommitInfo>,
}

/// Frames go out under credit.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) commit: Option<CommitInfo>,
}

/// Everything is out; the receiver has the last word.
#[derive(Debug)]
pub(super) struct Committing {
    commit: Box<Commit>,
    /// Heartbeats up to this one were sent before the commit (or its last repetition).
    sent_after_heartbeat: u32,
}

/// `Abort` is out; waits for the receiver's, for the end of the stream, or for the linger time.
#[derive(Debug)]
pub(super) struct Aborting {
    pub(super) error: TransferError,
    pub(super) until_ms: u64,
}

impl Opening {
    pub(super) fn accepted(self, accepted: &OpenAccepted, link: &mut Link) -> State {
        if !(VERSION_MIN..=VERSION_MAX).contains(&accepted.version) {
            let (min, max) = (accepted.version, accepted.version);
            let error = TransferError::Version { min, max };
            link.send_abort(&error);
            return link.failed(error);
        }
        // Over UCX frames and heartbeats go different ways.
        let is_probed = accepted.features & FEATURE_UCX == 0;
        link.flow.begin(accepted.granted_bytes, link.heard.at_ms, is_probed);
        Sending { commit: self.commit }.advance(link)
    }
}

impl Sending {
    /// Sends what credit allows, and the commit behind the last frame.
    pub(super) fn advance(self, link: &mut Link) -> State {
        link.send_under_credit();
        match self.commit {
            Some(info) if link.flow.queue.is_empty() => Committing::begin(info, link),
            commit => State::Sending(Sending { commit }),
        }
    }
}

impl Committing {
    fn begin(info: CommitInfo, link: &mut Link) -> State {
        let commit = Box::new(commit_of(info, &link.flow.digest));
        link.send(Body::Commit(commit.clone()));
        let sent_after_heartbeat = link.heartbeat_sequence;
        State::Committing(Committing { commit, sent_after_heartbeat })
    }

    /// A heartbeat that followed the commit is answered, but the commit has not arrived.
    pub(super) fn repeat_if_lost(&mut self, ack: &HeartbeatAck, link: &mut Link) {
        if !ack.has_commit && ack.sequence > self.sent_after_heartbeat {
            link.send(Body::Commit(self.commit.clone()));
            self.sent_after_heartbeat = link.heartbeat_sequence;
        }
    }
}

impl Aborting {
    pub(super) fn begin(error: TransferError, now_ms: u64, link: &mut Link) -> State {
        link.send_abort(&error);
        link.flow = super::Flow::default();
        State::Aborting(Aborting { error, until_ms: now_ms + link.config.timing.abort_linger_ms })
    }

    pub(super) fn tick(self, now_ms: u64, link: &mut Link) -> State {
        if now_ms >= self.until_ms { link.failed(self.error) } else { State::Aborting(self) }
    }
}
