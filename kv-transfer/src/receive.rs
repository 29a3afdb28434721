//! Runs a [`Receiver`] over a stream that a sender has opened.

use std::collections::VecDeque;
use std::future::Future;
use std::time::Duration;

use baton_types::{Error, TransferId};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::TransferError;
use crate::clock::Clock;
use crate::frame::{Frame, FrameKey};
use crate::message::{Body, Commit, KvMessage};
use crate::receiver::{Receiver, ReceiverAction};
use crate::transport::TransportStream;

/// Where verified KV goes: the node's engine.
pub trait Placer: Send + Sync {
    /// Writes one frame into the reserved blocks. Several run at once, as many as the window
    /// holds; a transfer ends only after each has returned.
    ///
    /// # Errors
    /// The transfer fails with it.
    fn place(&self, frame: &Frame) -> impl Future<Output = Result<(), Error>> + Send;

    /// Checks the sampler's digest and starts decoding. Called once, after everything is placed.
    ///
    /// # Errors
    /// The transfer fails with it.
    fn activate(&self, commit: Commit) -> impl Future<Output = Result<(), Error>> + Send;
}

/// How a stream ended.
#[derive(Clone, Debug, PartialEq)]
pub enum ReceiverOutcome {
    /// Decoding has started.
    Committed,
    /// The machine is free: no write can follow, its blocks may be reused or granted again.
    Failed(TransferError),
    /// A stranger's stream: the grant still waits for its own sender.
    Refused(TransferError),
}

/// Reads a new stream's first message and says which transfer it is for, so that the node can
/// find the machine; then `drive` takes both.
///
/// # Errors
/// `PeerSilent` where nothing comes in time, `Closed`, or `Message` where it is no `Open`.
pub async fn read_open(
    stream: &mut TransportStream,
    within: Duration,
) -> Result<(TransferId, KvMessage), TransferError> {
    let silent = TransferError::PeerSilent { silent_ms: within.as_millis() as u64 };
    let first = timeout(within, stream.incoming.next()).await.map_err(|_| silent)?;
    let message = first.ok_or(TransferError::Closed)??;
    match &message.body {
        Body::Open(_) => Ok((message.context.transfer_id, message)),
        _ => {
            let error = TransferError::Mismatch {
                what: "first message",
                granted: "Open".into(),
                peer: "another".into(),
            };
            refuse(stream, &message, &error);
            Err(error)
        }
    }
}

/// Sends a stream away whose first message is `first`, for instance because nobody knows its
/// transfer; then drop the stream.
pub fn refuse(stream: &TransportStream, first: &KvMessage, error: &TransferError) {
    let body = Body::Abort { code: error.code(), message: error.to_string() };
    // A fresh stream has room, and a peer that has gone needs no answer.
    let _ = stream.outgoing.try_send(KvMessage { context: first.context, body });
}

/// What `drive` waits for besides messages.
enum Finished {
    Placed(FrameKey, Result<(), Error>),
    Activated(Result<(), Error>),
}

/// Runs a granted machine over a stream, whose first message is `first`, until no write can
/// follow. `clock` must be the one whose time the grant was made with.
///
/// Where `fence` fires (the request is cancelled, or a later attempt replaces it), the transfer
/// ends as soon as nothing is being placed; a commit that came first wins.
///
/// Not cancel safe: a dropped future leaves the machine amid its states, and a frame perhaps
/// half placed. Use `fence`.
pub async fn drive<P: Placer>(
    receiver: &mut Receiver,
    first: KvMessage,
    mut stream: TransportStream,
    placer: &P,
    clock: Clock,
    fence: CancellationToken,
) -> ReceiverOutcome {
    let mut outbox: VecDeque<KvMessage> = VecDeque::new();
    let mut running = FuturesUnordered::new();
    let (mut is_open, mut is_readable, mut is_fenced) = (true, true, false);
    receiver.on_message(first, clock.now_ms());
    loop {
        while let Some(action) = receiver.next_action() {
            match action {
                ReceiverAction::Send(message) => outbox.push_back(message),
                ReceiverAction::Place(frame) => running.push(run(placer, Work::Place(frame))),
                ReceiverAction::Activate(commit) => {
                    running.push(run(placer, Work::Activate(commit)));
                }
                ReceiverAction::Close => {
                    (is_open, is_readable) = (false, false);
                    stream.incoming = futures::stream::pending().boxed();
                    receiver.on_closed();
                }
                ReceiverAction::Refused(error) => {
                    flush(&stream, outbox);
                    return ReceiverOutcome::Refused(error);
                }
                ReceiverAction::Free(outcome) => {
                    flush(&stream, outbox);
                    return outcome.map_or_else(ReceiverOutcome::Failed, |()| {
                        ReceiverOutcome::Committed
                    });
                }
            }
        }
        tokio::select! {
            Some(finished) = running.next() => match finished {
                Finished::Placed(key, result) => receiver.placed(key, result, clock.now_ms()),
                Finished::Activated(result) => receiver.activated(result, clock.now_ms()),
            },
            incoming = stream.incoming.next(), if is_readable => match incoming {
                Some(Ok(message)) => receiver.on_message(message, clock.now_ms()),
                Some(Err(TransferError::Message(_))) => receiver.on_undecodable(),
                Some(Err(_)) | None => {
                    is_readable = false;
                    receiver.on_closed();
                }
            },
            permit = stream.outgoing.reserve(), if is_open && !outbox.is_empty() => {
                match (permit, outbox.pop_front()) {
                    (Ok(permit), Some(message)) => permit.send(message),
                    _ => is_open = false,
                }
            }
            () = sleep_until(clock.instant(receiver.next_tick_ms())) => {
                receiver.tick(clock.now_ms());
            }
            () = fence.cancelled(), if !is_fenced => {
                is_fenced = true;
                receiver.abort(TransferError::Superseded, clock.now_ms());
            }
        }
    }
}

enum Work {
    Place(Frame),
    Activate(Box<Commit>),
}

async fn run<P: Placer>(placer: &P, work: Work) -> Finished {
    match work {
        Work::Place(frame) => Finished::Placed(frame.key(), placer.place(&frame).await),
        Work::Activate(commit) => Finished::Activated(placer.activate(*commit).await),
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
