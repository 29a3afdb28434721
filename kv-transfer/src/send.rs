//! Runs a [`Sender`] over a stream.

use std::collections::VecDeque;

use futures::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::message::{CommitInfo, KvMessage};
use crate::sender::{Sender, SenderAction, SenderReport};
use crate::transport::{STREAM_MESSAGES_MAX, TransportStream};
use crate::{KvSpan, TransferError};

/// What the engine hands to a running transfer.
#[derive(Clone, Debug)]
pub enum Outgoing {
    Span(KvSpan),
    /// No more spans follow.
    Finish(Box<CommitInfo>),
}

/// Runs a transfer to its end.
///
/// `spans` is bounded by its maker; it is read only while the sender's queue has room, so the
/// bound is the back pressure. Where it closes before `Finish`, the transfer is cancelled. Where
/// `cancel` fires, the receiver is told and the transfer ends.
///
/// Dropping the future closes the stream at once, which the receiver notices; prefer `cancel`.
///
/// # Errors
/// Why the transfer failed; the receiver has been told where it could be.
pub async fn drive(
    mut sender: Sender,
    stream: TransportStream,
    spans: mpsc::Receiver<Outgoing>,
    clock: Clock,
    cancel: CancellationToken,
) -> Result<SenderReport, TransferError> {
    sender.connected(stream.features, clock.now_ms());
    sender.keep_pace(stream.pace.clone());
    let outbox = VecDeque::new();
    let mut session = Session { sender, stream, spans, clock, cancel, outbox, is_open: true };
    loop {
        if let Some(outcome) = session.obey() {
            session.stream.send_last(session.outbox);
            return outcome;
        }
        session.wait().await;
    }
}

struct Session {
    sender: Sender,
    stream: TransportStream,
    spans: mpsc::Receiver<Outgoing>,
    clock: Clock,
    cancel: CancellationToken,
    /// Bounded by credit.
    outbox: VecDeque<KvMessage>,
    is_open: bool,
}

enum Event {
    Incoming(Option<Result<KvMessage, TransferError>>),
    Outgoing(Option<Outgoing>),
    Cancelled,
    Due,
}

impl Session {
    /// Does what the machine asks for; `Some` ends the session.
    fn obey(&mut self) -> Option<Result<SenderReport, TransferError>> {
        while let Some(action) = self.sender.next_action() {
            match action {
                SenderAction::Send(message) => self.outbox.push_back(message),
                SenderAction::Done(report) => return Some(Ok(report)),
                SenderAction::Failed(error) => return Some(Err(error)),
            }
        }
        None
    }

    /// Waits for one event and tells the machine.
    async fn wait(&mut self) {
        let due_ms = self.sender.next_tick_ms();
        let due = self.clock.instant(due_ms);
        let event = tokio::select! {
            permit = self.stream.outgoing.reserve(), if self.is_open && !self.outbox.is_empty() => {
                match (permit, self.outbox.pop_front()) {
                    (Ok(permit), Some(message)) => permit.send(message),
                    // What the peer said last, perhaps why, may still be in `incoming`.
                    _ => self.is_open = false,
                }
                return;
            }
            incoming = self.stream.incoming.next() => Event::Incoming(incoming),
            outgoing = self.spans.recv(), if self.sender.wants_spans() => Event::Outgoing(outgoing),
            () = sleep_until(due) => Event::Due,
            () = self.cancel.cancelled(), if !self.sender.is_ending() => Event::Cancelled,
        };
        let now_ms = self.clock.now_ms();
        match event {
            Event::Incoming(incoming) => self.heard(incoming),
            Event::Outgoing(Some(Outgoing::Span(span))) => {
                if let Err(error) = self.sender.push_span(&span) {
                    self.sender.abort(error, now_ms);
                }
            }
            Event::Outgoing(Some(Outgoing::Finish(info))) => self.sender.finish(*info),
            Event::Outgoing(None) | Event::Cancelled => {
                self.sender.abort(TransferError::Cancelled, now_ms);
            }
            Event::Due => self.tick(due_ms),
        }
    }

    fn heard(&mut self, incoming: Option<Result<KvMessage, TransferError>>) {
        match incoming {
            Some(Ok(message)) => self.sender.on_message(message, self.clock.now_ms()),
            // As good as lost: what it said is repeated in the next heartbeat's answer.
            Some(Err(TransferError::Message(_))) => {}
            Some(Err(_)) | None => self.sender.on_closed(),
        }
    }

    /// Listens before it judges a silence, and judges it by the time in which this task itself had
    /// a processor.
    fn tick(&mut self, due_ms: u64) {
        for _ in 0..STREAM_MESSAGES_MAX {
            if self.sender.is_over() {
                break;
            }
            let Some(incoming) = self.stream.incoming.next().now_or_never() else { break };
            self.heard(incoming);
        }
        let now_ms = self.clock.now_ms();
        self.sender.woken(due_ms, now_ms);
        self.sender.tick(now_ms);
    }
}
