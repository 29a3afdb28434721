//! Runs a [`Sender`] over a stream.

use std::collections::VecDeque;

use futures::StreamExt;
use tokio::sync::mpsc;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::message::{CommitInfo, KvMessage};
use crate::sender::{Sender, SenderAction, SenderReport};
use crate::transport::TransportStream;
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
    mut stream: TransportStream,
    mut spans: mpsc::Receiver<Outgoing>,
    clock: Clock,
    cancel: CancellationToken,
) -> Result<SenderReport, TransferError> {
    let mut outbox: VecDeque<KvMessage> = VecDeque::new();
    let mut is_open = true;
    loop {
        while let Some(action) = sender.next_action() {
            match action {
                SenderAction::Send(message) => outbox.push_back(message),
                SenderAction::Done(report) => return Ok(report),
                SenderAction::Failed(error) => {
                    flush(&stream, outbox);
                    return Err(error);
                }
            }
        }
        tokio::select! {
            permit = stream.outgoing.reserve(), if is_open && !outbox.is_empty() => {
                match (permit, outbox.pop_front()) {
                    (Ok(permit), Some(message)) => permit.send(message),
                    // What the peer said last, perhaps why, may still be in `incoming`.
                    _ => is_open = false,
                }
            }
            incoming = stream.incoming.next() => match incoming {
                Some(Ok(message)) => sender.on_message(message, clock.now_ms()),
                // As good as lost: what it said is repeated in the next heartbeat's answer.
                Some(Err(TransferError::Message(_))) => {}
                Some(Err(_)) | None => sender.on_closed(),
            },
            outgoing = spans.recv(), if sender.wants_spans() => {
                if let Err(error) = take(&mut sender, outgoing) {
                    sender.abort(error, clock.now_ms());
                }
            }
            () = sleep_until(clock.instant(sender.next_tick_ms())) => {
                sender.tick(clock.now_ms());
            }
            () = cancel.cancelled(), if !sender.is_ending() => {
                sender.abort(TransferError::Cancelled, clock.now_ms());
            }
        }
    }
}

fn take(sender: &mut Sender, outgoing: Option<Outgoing>) -> Result<(), TransferError> {
    match outgoing {
        Some(Outgoing::Span(span)) => sender.push_span(&span),
        Some(Outgoing::Finish(info)) => {
            sender.finish(*info);
            Ok(())
        }
        None => Err(TransferError::Cancelled),
    }
}

/// Gives the transport what it takes at once; the peer learns the rest from the closing.
fn flush(stream: &TransportStream, outbox: VecDeque<KvMessage>) {
    for message in outbox {
        if stream.outgoing.try_send(message).is_err() {
            return;
        }
    }
}
