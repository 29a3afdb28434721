//! The sending end: frames wait for a slot of the receiver's staging region, go there, and are
//! kept until the receiver has released the slot. Where the link fails, each frame that was not
//! released goes back to its stream, which sends it another way: frames that come twice do no harm.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::mpsc;

use super::notice::{self, Slot};
use super::ucp::{EndpointId, OpId, UcpError, Worker};
use super::{Attached, Counters, Operation};
use crate::pace::LinkPace;

/// An operation that is not over after so long: the peer has stopped, or the link is cut.
const STALLED: Duration = Duration::from_secs(2);

/// Frames that a failed link gives back to their stream.
pub(super) type GivenBack = mpsc::UnboundedSender<Bytes>;

/// What the transport knows of a link.
#[derive(Debug, Default)]
pub(super) struct LinkState {
    has_failed: AtomicBool,
    was_detached: AtomicBool,
    has_worked: AtomicBool,
    /// For the log.
    peer: String,
    pace: Arc<LinkPace>,
}

impl LinkState {
    pub(super) fn new(peer: String, pace: Arc<LinkPace>) -> Self {
        Self { peer, pace, ..Self::default() }
    }

    /// The peer has taken a frame from it, at least once.
    pub(super) fn has_worked(&self) -> bool {
        self.has_worked.load(Ordering::Acquire)
    }

    /// Frames of so many bytes have arrived, whose operation was begun at `since`.
    fn moved(&self, bytes: u64, since: Instant) {
        let ms = since.elapsed().as_millis() as u64;
        self.pace.observe(bytes, ms, ms, false);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// It was idle, and the receiver took its region back.
    pub(super) fn was_detached(&self) -> bool {
        self.was_detached.load(Ordering::Acquire)
    }
}

/// All peers that this node sends to; a link is named by the receiver's token.
pub(super) struct Outbound {
    operation: Operation,
    links: HashMap<u64, Link>,
    ops: HashMap<OpId, (u64, Step)>,
}

struct Link {
    endpoint: EndpointId,
    state: Arc<LinkState>,
    base: u64,
    slot_bytes: u32,
    free: Vec<u16>,
    waiting: VecDeque<Outgoing>,
    /// By slot.
    sent: HashMap<u16, Outgoing>,
    unflushed: Vec<Slot>,
    is_flushing: bool,
    running: HashSet<OpId>,
    /// The receiver wants its region back.
    is_detaching: bool,
}

struct Outgoing {
    frame: Bytes,
    stream: GivenBack,
}

/// What an operation of a link was.
enum Step {
    Put,
    Flush(Vec<Slot>, Instant),
    /// A frame is fetched.
    Fetched(u64, Instant),
    Notice,
    /// The last word of a link that the receiver has given up.
    Detached,
}

impl Outbound {
    pub(super) fn new(operation: Operation) -> Self {
        Self { operation, links: HashMap::new(), ops: HashMap::new() }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.links.values().all(|link| link.running.is_empty())
    }

    /// Connects to a peer that has attached this node.
    pub(super) fn connect(
        &mut self,
        worker: &mut Worker,
        address: &[u8],
        attached: &Attached,
        state: Arc<LinkState>,
    ) -> Result<(), UcpError> {
        let endpoint = worker.connect(address)?;
        if let Err(error) = worker.unlock(endpoint, &attached.rkey) {
            worker.close(endpoint);
            return Err(error);
        }
        let link = Link {
            endpoint,
            state,
            base: attached.base,
            slot_bytes: attached.slot_bytes,
            free: (0..attached.slots).rev().collect(),
            waiting: VecDeque::new(),
            sent: HashMap::new(),
            unflushed: Vec::new(),
            is_flushing: false,
            running: HashSet::new(),
            is_detaching: false,
        };
        self.links.insert(attached.token, link);
        Ok(())
    }

    /// Sends a frame when there is a slot for it.
    pub(super) fn send(&mut self, token: u64, frame: Bytes, stream: GivenBack) {
        match self.links.get_mut(&token) {
            Some(link) if frame.len() <= link.slot_bytes as usize => {
                link.waiting.push_back(Outgoing { frame, stream });
            }
            // The stream may have ended.
            _ => drop(stream.send(frame)),
        }
    }

    /// Starts what can be started.
    pub(super) fn pump(&mut self, worker: &mut Worker, counters: &Counters) {
        let mut failed = Vec::new();
        for (&token, link) in &mut self.links {
            if let Err(error) = link.pump(worker, token, self.operation, &mut self.ops, counters) {
                failed.push((token, error.to_string()));
            }
        }
        for (token, reason) in failed {
            self.fail(worker, token, &reason, counters);
        }
    }

    /// Whether that was an operation of a link, which is over.
    pub(super) fn on_done(
        &mut self,
        worker: &mut Worker,
        op: OpId,
        result: &Result<(), String>,
        counters: &Counters,
    ) -> bool {
        let Some((token, step)) = self.ops.remove(&op) else { return false };
        let Some(link) = self.links.get_mut(&token) else { return true };
        link.running.remove(&op);
        if let Err(reason) = result {
            self.fail(worker, token, reason, counters);
            return true;
        }
        match step {
            Step::Put | Step::Notice => {}
            Step::Fetched(bytes, since) => link.state.moved(bytes, since),
            Step::Flush(slots, since) => {
                link.is_flushing = false;
                link.state.moved(slots.iter().map(|slot| u64::from(slot.len)).sum(), since);
                let header = notice::encode(token, &slots);
                match worker.send(link.endpoint, notice::PUT, header, Bytes::new()) {
                    Ok(op) => link.start(op, token, Step::Notice, &mut self.ops),
                    Err(error) => self.fail(worker, token, &error.to_string(), counters),
                }
            }
            Step::Detached => {
                worker.close(link.endpoint);
                self.links.remove(&token);
            }
        }
        true
    }

    /// The receiver has read these slots.
    pub(super) fn on_release(&mut self, (token, slots): (u64, Vec<Slot>)) {
        let Some(link) = self.links.get_mut(&token) else { return };
        link.state.has_worked.store(true, Ordering::Release);
        for Slot { slot, .. } in slots {
            if link.sent.remove(&slot).is_some() {
                link.free.push(slot);
            }
        }
    }

    /// The receiver wants its region back. Whether the token is a link's.
    pub(super) fn on_detach(&mut self, token: u64) -> bool {
        let Some(link) = self.links.get_mut(&token) else { return false };
        link.is_detaching = true;
        link.state.was_detached.store(true, Ordering::Release);
        link.state.has_failed.store(true, Ordering::Release);
        link.give_back();
        true
    }

    /// Whether the endpoint was a link's.
    pub(super) fn on_peer_lost(
        &mut self,
        worker: &mut Worker,
        endpoint: EndpointId,
        reason: &str,
        counters: &Counters,
    ) -> bool {
        let found = self.links.iter().find(|(_, link)| link.endpoint == endpoint);
        let Some((&token, _)) = found else { return false };
        self.fail(worker, token, reason, counters);
        true
    }

    /// Fails links that do not get on.
    pub(super) fn tick(&mut self, worker: &mut Worker, counters: &Counters) {
        let now = Instant::now();
        let is_stalled = |link: &Link| {
            worker.oldest_op(link.endpoint).is_some_and(|since| now - since >= STALLED)
        };
        let stalled: Vec<_> = self
            .links
            .iter()
            .filter(|(_, link)| is_stalled(link))
            .map(|(&token, _)| token)
            .collect();
        for token in stalled {
            let reason = format!("nothing moved for {} ms", STALLED.as_millis());
            self.fail(worker, token, &reason, counters);
        }
    }

    /// Ends everything, before the worker goes.
    pub(super) fn clear(&mut self, worker: &mut Worker, reason: &str, counters: &Counters) {
        let tokens: Vec<_> = self.links.keys().copied().collect();
        for token in tokens {
            self.fail(worker, token, reason, counters);
        }
        self.ops.clear();
    }

    fn fail(&mut self, worker: &mut Worker, token: u64, reason: &str, counters: &Counters) {
        let Some(mut link) = self.links.remove(&token) else { return };
        if !link.is_detaching {
            tracing::info!(peer = link.state.peer, reason, "a UCX link has failed");
            counters.failed_links.fetch_add(1, Ordering::Relaxed);
        }
        link.state.has_failed.store(true, Ordering::Release);
        worker.close(link.endpoint);
        link.give_back();
    }
}

impl Link {
    fn pump(
        &mut self,
        worker: &mut Worker,
        token: u64,
        operation: Operation,
        ops: &mut HashMap<OpId, (u64, Step)>,
        counters: &Counters,
    ) -> Result<(), UcpError> {
        if self.is_detaching {
            if self.running.is_empty() {
                let header = notice::encode(token, &[]);
                let op = worker.send(self.endpoint, notice::DETACH, header, Bytes::new())?;
                self.start(op, token, Step::Detached, ops);
            }
            return Ok(());
        }
        while let Some(&slot) = self.free.last() {
            let Some(outgoing) = self.waiting.pop_front() else { break };
            if outgoing.stream.is_closed() {
                continue;
            }
            self.free.pop();
            let (frame, place) = (outgoing.frame.clone(), self.place(slot));
            let taken = Slot { slot, len: frame.len() as u32 };
            self.sent.insert(slot, outgoing);
            let sent_bytes = &counters.sent_bytes;
            sent_bytes.fetch_add(frame.len() as u64, Ordering::Relaxed);
            let (op, step) = match operation {
                Operation::Put => {
                    self.unflushed.push(taken);
                    (worker.put(self.endpoint, frame, place)?, Step::Put)
                }
                Operation::Fetch => {
                    let header = notice::encode(token, &[taken]);
                    let step = Step::Fetched(taken.len.into(), Instant::now());
                    (worker.send(self.endpoint, notice::FETCH, header, frame)?, step)
                }
            };
            self.start(op, token, step, ops);
        }
        if !self.is_flushing && !self.unflushed.is_empty() {
            let op = worker.flush(self.endpoint)?;
            self.is_flushing = true;
            let slots = std::mem::take(&mut self.unflushed);
            self.start(op, token, Step::Flush(slots, Instant::now()), ops);
        }
        Ok(())
    }

    fn start(&mut self, op: OpId, token: u64, step: Step, ops: &mut HashMap<OpId, (u64, Step)>) {
        self.running.insert(op);
        ops.insert(op, (token, step));
    }

    fn place(&self, slot: u16) -> u64 {
        self.base + u64::from(slot) * u64::from(self.slot_bytes)
    }

    fn give_back(&mut self) {
        let sent = self.sent.drain().map(|(_, outgoing)| outgoing);
        for Outgoing { frame, stream } in sent.chain(self.waiting.drain(..)) {
            // Streams that have ended want nothing back.
            let _ended = stream.send(frame);
        }
        self.unflushed.clear();
    }
}
