//! Runs a [`Receiver`] over a stream that a sender has opened.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use baton_types::{Epoch, Error, TransferId};
use futures::future::{BoxFuture, FusedFuture};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::time::{sleep_until, timeout};

use crate::TransferError;
use crate::clock::Clock;
use crate::frame::{Frame, FrameKey};
use crate::message::{Body, Commit, Context, KvMessage};
use crate::receiver::{Receiver, ReceiverAction};
use crate::transport::{STREAM_MESSAGES_MAX, TransportStream};

/// Where verified KV goes: the node's engine.
pub trait Placer: Send + Sync {
    /// Writes one frame into the reserved blocks. Several run at once, as many as the window
    /// holds; a transfer ends only after each has returned.
    ///
    /// # Errors
    /// The transfer fails with it.
    fn place(&self, frame: &Frame) -> impl Future<Output = Result<(), Error>> + Send;

    /// Checks the sampler's digest and starts decoding. Called once, after everything is placed.
    /// `is_converted`: the KV that came had another precision at its sender.
    ///
    /// # Errors
    /// The transfer fails with it.
    fn activate(
        &self,
        commit: Commit,
        is_converted: bool,
    ) -> impl Future<Output = Result<(), Error>> + Send;
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
    let first = match timeout(within, stream.incoming.next()).await {
        Ok(first) => first.unwrap_or(Err(TransferError::Closed)),
        Err(_) => Err(silent),
    };
    let message = match first {
        Ok(message) => message,
        Err(error) => {
            abort(stream, NO_TRANSFER, &error);
            return Err(error);
        }
    };
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
    abort(stream, first.context, error);
}

/// Where the stream named no transfer.
const NO_TRANSFER: Context = Context { transfer_id: TransferId([0; 16]), epoch: Epoch(0) };

fn abort(stream: &TransportStream, context: Context, error: &TransferError) {
    let body = Body::Abort { code: error.code(), message: error.to_string() };
    // A fresh stream has room, and a peer that has gone needs no answer.
    let _ = stream.outgoing.try_send(KvMessage { context, body });
}

/// Runs a granted machine over a stream, whose first message is `first`, until no write can
/// follow. `clock` must be the one whose time the grant was made with.
///
/// When `fence` yields (`Cancelled`, or `Superseded` by a later attempt), the transfer ends as
/// soon as nothing is being placed; a commit that came first wins. Where there is nothing to wait
/// for, pass `std::future::pending()`.
///
/// Not cancel safe: a dropped future leaves the machine amid its states, and a frame perhaps
/// half placed. Use `fence`.
pub async fn drive<P: Placer>(
    receiver: &mut Receiver,
    first: KvMessage,
    stream: TransportStream,
    placer: &P,
    clock: Clock,
    fence: impl Future<Output = TransferError>,
) -> ReceiverOutcome {
    receiver.offer(stream.features);
    receiver.on_message(first, clock.now_ms());
    let mut session = Session {
        receiver,
        stream,
        placer,
        clock,
        outbox: VecDeque::new(),
        running: FuturesUnordered::new(),
        is_open: true,
        is_readable: true,
    };
    let mut fence = pin!(fence.fuse());
    loop {
        if let Some(outcome) = session.obey() {
            session.stream.send_last(session.outbox);
            return outcome;
        }
        tokio::select! {
            () = session.wait() => {}
            error = &mut fence, if !fence.is_terminated() => {
                session.receiver.abort(error, clock.now_ms());
            }
        }
    }
}

struct Session<'a, P> {
    receiver: &'a mut Receiver,
    stream: TransportStream,
    placer: &'a P,
    clock: Clock,
    /// Bounded by what comes in: credits, and answers to heartbeats.
    outbox: VecDeque<KvMessage>,
    /// Bounded by the window.
    running: FuturesUnordered<BoxFuture<'a, Finished>>,
    is_open: bool,
    is_readable: bool,
}

enum Event {
    Incoming(Option<Result<KvMessage, TransferError>>),
    Finished(Finished),
    Due,
}

enum Finished {
    Placed(FrameKey, Result<(), Error>),
    Activated(Result<(), Error>),
}

impl<P: Placer> Session<'_, P> {
    /// Does what the machine asks for; `Some` ends the session.
    fn obey(&mut self) -> Option<ReceiverOutcome> {
        let placer = self.placer;
        while let Some(action) = self.receiver.next_action() {
            match action {
                ReceiverAction::Send(message) => self.outbox.push_back(message),
                ReceiverAction::Place(frame) => self.running.push(Box::pin(async move {
                    Finished::Placed(frame.key(), placer.place(&frame).await)
                })),
                ReceiverAction::Activate(commit) => {
                    let is_converted = self.receiver.is_converted();
                    self.running.push(Box::pin(async move {
                        Finished::Activated(placer.activate(*commit, is_converted).await)
                    }));
                }
                ReceiverAction::Close => {
                    self.stream.send_last(self.outbox.drain(..));
                    self.stream.incoming = futures::stream::empty().boxed();
                    (self.is_open, self.is_readable) = (false, false);
                    self.receiver.on_closed();
                }
                ReceiverAction::Refused(error) => return Some(ReceiverOutcome::Refused(error)),
                ReceiverAction::Free(Ok(())) => return Some(ReceiverOutcome::Committed),
                ReceiverAction::Free(Err(error)) => return Some(ReceiverOutcome::Failed(error)),
            }
        }
        None
    }

    /// Waits for one event and tells the machine. Cancel safe.
    async fn wait(&mut self) {
        let due_ms = self.receiver.next_tick_ms();
        let due = self.clock.instant(due_ms);
        let event = tokio::select! {
            Some(finished) = self.running.next() => Event::Finished(finished),
            incoming = self.stream.incoming.next(), if self.is_readable => {
                Event::Incoming(incoming)
            }
            permit = self.stream.outgoing.reserve(), if self.is_open && !self.outbox.is_empty() => {
                match (permit, self.outbox.pop_front()) {
                    (Ok(permit), Some(message)) => permit.send(message),
                    _ => self.is_open = false,
                }
                return;
            }
            () = sleep_until(due) => Event::Due,
        };
        match event {
            Event::Incoming(incoming) => self.heard(incoming),
            Event::Due => self.tick(due_ms),
            Event::Finished(Finished::Placed(key, result)) => {
                self.receiver.placed(key, result, self.clock.now_ms());
            }
            Event::Finished(Finished::Activated(result)) => {
                self.receiver.activated(result, self.clock.now_ms());
            }
        }
    }

    fn heard(&mut self, incoming: Option<Result<KvMessage, TransferError>>) {
        match incoming {
            Some(Ok(message)) => self.receiver.on_message(message, self.clock.now_ms()),
            Some(Err(TransferError::Message(_))) => self.receiver.on_undecodable(),
            Some(Err(_)) | None => {
                self.is_readable = false;
                self.receiver.on_closed();
            }
        }
    }

    /// Listens before it judges a silence, and judges it by the time in which this task itself had
    /// a processor.
    fn tick(&mut self, due_ms: u64) {
        for _ in 0..STREAM_MESSAGES_MAX {
            if !self.is_readable {
                break;
            }
            let Some(incoming) = self.stream.incoming.next().now_or_never() else { break };
            self.heard(incoming);
        }
        let now_ms = self.clock.now_ms();
        self.receiver.woken(due_ms, now_ms);
        self.receiver.tick(now_ms);
    }
}
