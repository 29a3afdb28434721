//! The receiver's states; each transition consumes one and yields the next.

use baton_types::Error;

use super::{Arrived, Link, ReceiverAction};
use crate::TransferError;
use crate::frame::{Frame, FrameKey};
use crate::message::{Body, Commit, Open};
use crate::timing::Heard;

#[derive(Debug)]
pub(super) enum State {
    Granted(Granted),
    Open(OpenState),
    Receiving(Receiving),
    Activating(Activating),
    Committed(Committed),
    Aborting(Aborting),
    Free { committed: bool },
}

/// Nobody has come yet.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) expires_ms: u64,
}

/// Accepted; nothing has come under it yet.
#[derive(Debug)]
pub(super) struct OpenState {
    arrived: Arrived,
}

/// Frames, or the commit before them.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) arrived: Arrived,
}

/// Everything is in place; the engine is being told. A sender that dies now does no harm.
#[derive(Debug)]
pub(super) struct Activating;

/// Decoding runs; the sender is answered until it closes.
#[derive(Debug)]
pub(super) struct Committed;

/// Quarantine: the old stream may still bring frames, or one is being placed.
#[derive(Debug)]
pub(super) struct Aborting {
    error: TransferError,
    until_ms: u64,
    /// The stream has ended, or the peer has acknowledged.
    is_fenced: bool,
}

impl State {
    pub(super) fn open(self, open: &Open, now_ms: u64, link: &mut Link) -> State {
        match self {
            State::Granted(granted) => match link.check_open(open, now_ms) {
                Ok(()) => {
                    link.features = open.features & link.offered;
                    link.sender = Some(open.sender.clone());
                    link.is_converted = open.numerics != link.grant.numerics;
                    link.send_accepted();
                    State::Open(OpenState { arrived: Arrived::new(&link.grant, now_ms) })
                }
                Err(error) => {
                    link.refuse(link.context(), error);
                    State::Granted(granted)
                }
            },
            other => {
                link.counters.duplicate += 1;
                other
            }
        }
    }

    pub(super) fn frame(self, frame: Frame, now_ms: u64, link: &mut Link) -> State {
        match self {
            State::Open(OpenState { mut arrived })
            | State::Receiving(Receiving { mut arrived }) => {
                match arrived.take(frame, now_ms, link) {
                    Ok(()) => State::Receiving(Receiving { arrived }),
                    Err(error) => Aborting::begin(error, now_ms, link),
                }
            }
            State::Activating(_) | State::Committed(_) => {
                link.counters.duplicate += 1;
                self
            }
            State::Granted(_) | State::Aborting(_) | State::Free { .. } => {
                link.counters.stale += 1;
                self
            }
        }
    }

    pub(super) fn commit(self, commit: Box<Commit>, now_ms: u64, link: &mut Link) -> State {
        match self {
            State::Open(OpenState { mut arrived })
            | State::Receiving(Receiving { mut arrived }) => {
                arrived.commit.get_or_insert(commit);
                Receiving { arrived }.activate_if_ready(now_ms, link)
            }
            State::Committed(_) => {
                link.send(Body::Committed);
                self
            }
            State::Activating(_) => self,
            State::Granted(_) | State::Aborting(_) | State::Free { .. } => {
                link.counters.stale += 1;
                self
            }
        }
    }

    pub(super) fn placed(self, key: FrameKey, now_ms: u64, link: &mut Link) -> State {
        match self {
            State::Receiving(receiving) => {
                receiving.arrived.placed(key, link);
                receiving.activate_if_ready(now_ms, link)
            }
            other => other,
        }
    }

    pub(super) fn aborted_by_peer(self, error: TransferError, link: &mut Link) -> State {
        match self {
            State::Open(_) | State::Receiving(_) => {
                let body = Body::Abort { code: error.code(), message: error.to_string() };
                link.send(body);
                let aborting = Aborting { error, until_ms: u64::MAX, is_fenced: true };
                State::Aborting(aborting).free_if_quiet(link)
            }
            State::Aborting(aborting) => {
                State::Aborting(Aborting { is_fenced: true, ..aborting }).free_if_quiet(link)
            }
            State::Granted(_) | State::Activating(_) | State::Committed(_) | State::Free { .. } => {
                self
            }
        }
    }

    pub(super) fn closed(self, link: &mut Link) -> State {
        match self {
            State::Open(_) | State::Receiving(_) => {
                let error = TransferError::Closed;
                let aborting = Aborting { error, until_ms: u64::MAX, is_fenced: true };
                State::Aborting(aborting).free_if_quiet(link)
            }
            State::Aborting(aborting) => {
                State::Aborting(Aborting { is_fenced: true, ..aborting }).free_if_quiet(link)
            }
            State::Committed(_) => link.free(Ok(())),
            State::Granted(_) | State::Activating(_) | State::Free { .. } => self,
        }
    }

    /// Leaves the quarantine when no write can follow.
    pub(super) fn free_if_quiet(self, link: &mut Link) -> State {
        match self {
            State::Aborting(aborting) if aborting.is_fenced && link.placing.is_empty() => {
                link.free(Err(aborting.error))
            }
            other => other,
        }
    }

    pub(super) fn tick(self, now_ms: u64, link: &mut Link) -> State {
        match self {
            State::Granted(granted) if now_ms > granted.expires_ms => {
                link.free(Err(TransferError::GrantUnused))
            }
            State::Open(_) | State::Receiving(_) => match (link.overdue(now_ms), self) {
                (Some(error), _) => Aborting::begin(error, now_ms, link),
                (None, State::Receiving(mut receiving)) => {
                    if now_ms >= receiving.arrived.gaps_due_ms(link) {
                        receiving.arrived.ask_for_gaps(link);
                    }
                    State::Receiving(receiving)
                }
                (None, open) => open,
            },
            State::Committed(_) if now_ms >= link.silent_from_ms() => {
                link.heard = Heard::now(now_ms);
                link.actions.push_back(ReceiverAction::Close);
                self
            }
            State::Aborting(aborting) if now_ms >= aborting.until_ms => {
                link.actions.push_back(ReceiverAction::Close);
                State::Aborting(Aborting { until_ms: u64::MAX, ..aborting })
            }
            other => other,
        }
    }

    pub(super) fn next_tick_ms(&self, link: &Link) -> u64 {
        let running_ms = link.deadline_ms.min(link.silent_from_ms());
        match self {
            State::Granted(granted) => granted.expires_ms.saturating_add(1),
            State::Open(_) => running_ms,
            State::Receiving(receiving) => running_ms.min(receiving.arrived.gaps_due_ms(link)),
            State::Committed(_) => link.silent_from_ms(),
            State::Aborting(aborting) => aborting.until_ms,
            State::Activating(_) | State::Free { .. } => u64::MAX,
        }
    }
}

impl Receiving {
    fn activate_if_ready(mut self, now_ms: u64, link: &mut Link) -> State {
        match self.arrived.is_ready(link) {
            Ok(false) => State::Receiving(self),
            Ok(true) => {
                let commit = self.arrived.commit.take().expect("ready says that it is there");
                link.actions.push_back(ReceiverAction::Activate(commit));
                State::Activating(Activating)
            }
            Err(error) => Aborting::begin(error, now_ms, link),
        }
    }
}

impl Activating {
    pub(super) fn activated(
        self,
        result: Result<(), Error>,
        now_ms: u64,
        link: &mut Link,
    ) -> State {
        match result {
            Ok(()) => {
                link.send(Body::Committed);
                link.heard = Heard::now(now_ms);
                State::Committed(Committed)
            }
            Err(error) => Aborting::begin(TransferError::Place(error), now_ms, link),
        }
    }
}

impl Aborting {
    /// The peer is told and has the linger time to acknowledge; then the stream is closed.
    pub(super) fn begin(error: TransferError, now_ms: u64, link: &mut Link) -> State {
        link.send(Body::Abort { code: error.code(), message: error.to_string() });
        let until_ms = now_ms + link.config.timing.abort_linger_ms;
        State::Aborting(Aborting { error, until_ms, is_fenced: false })
    }
}
