//! The receiving end: a staging region for each peer, whose slots the peer fills; a frame lies in
//! its slot until the last of its bytes is dropped, and then the slot is the peer's again.
//!
//! A region is the peer's alone and never the pool of KV, so a write that comes late, or for an
//! attempt that was given up, meets no block of anybody.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::mpsc;

use super::notice::{self, Slot};
use super::slots::Slots;
use super::ucp::{EndpointId, OpId, Payload, RegionId, UcpError, Worker};
use super::{Attached, Command, Commands, Counters};
use crate::TransferError;
use crate::frame::{HEADER_BYTES, PAYLOAD_MAX_BYTES};
use crate::memory::Mapping;
use crate::message::{Body, Context, KvMessage};

/// Frames of one peer that may be on their way or not yet placed.
pub(super) const SLOTS: u16 = 16;
/// A frame as a message, in whole pages.
pub(super) const SLOT_BYTES: usize = (1 + HEADER_BYTES + PAYLOAD_MAX_BYTES).next_multiple_of(4096);
/// Peers with a region at once.
const ATTACHMENTS_MAX: usize = 64;
/// A region that no stream uses goes after so long; sooner where the last one ended badly.
const IDLE: Duration = Duration::from_secs(30);
const IDLE_AFTER_FAILURE: Duration = Duration::from_secs(1);
/// How long a peer may take to say that it writes no more.
const DETACH_WITHIN: Duration = Duration::from_secs(1);

pub(super) type Frames = mpsc::UnboundedSender<Result<KvMessage, TransferError>>;

/// All peers that send to this node.
#[derive(Default)]
pub(super) struct Inbound {
    attachments: HashMap<u64, Attachment>,
    fetching: HashMap<OpId, (u64, Slot)>,
}

struct Attachment {
    node: String,
    incarnation: u64,
    endpoint: EndpointId,
    region: RegionId,
    mapping: Arc<Mapping>,
    slots: Slots,
    routes: Vec<(Context, Frames)>,
    /// Streams that are open.
    streams: usize,
    idle_since: Instant,
    ended_badly: bool,
    to_release: Vec<Slot>,
    detaching_since: Option<Instant>,
}

impl Inbound {
    pub(super) fn is_idle(&self) -> bool {
        self.attachments.is_empty()
    }

    /// Makes a region for a peer.
    pub(super) fn attach(
        &mut self,
        worker: &mut Worker,
        node: String,
        incarnation: u64,
        address: &[u8],
        counters: &Counters,
    ) -> Result<Attached, String> {
        let fenced: Vec<_> = self
            .attachments
            .iter()
            .filter(|(_, old)| old.node == node && old.incarnation != incarnation)
            .map(|(&token, _)| token)
            .collect();
        for token in fenced {
            self.drop_attachment(worker, token, counters);
        }
        if self.attachments.len() >= ATTACHMENTS_MAX {
            return Err(format!("{ATTACHMENTS_MAX} peers have staging memory here already"));
        }
        let text = |error: UcpError| error.to_string();
        let mapping = Mapping::new(usize::from(SLOTS) * SLOT_BYTES)
            .map_err(|error| format!("no staging memory: {error}"))?;
        let mapping = Arc::new(mapping);
        let region = worker.register(mapping.clone()).map_err(text)?;
        let connected = worker.key(region).and_then(|key| Ok((key, worker.connect(address)?)));
        let (rkey, endpoint) = match connected {
            Ok(connected) => connected,
            Err(error) => {
                worker.unregister(region);
                return Err(text(error));
            }
        };
        counters.registered_bytes.fetch_add(mapping.len() as u64, Ordering::Relaxed);
        let token = rand::random();
        let base = mapping.address().as_ptr() as u64;
        let attachment = Attachment {
            node,
            incarnation,
            endpoint,
            region,
            mapping,
            slots: Slots::new(SLOTS, SLOT_BYTES as u32),
            routes: Vec::new(),
            streams: 0,
            idle_since: Instant::now(),
            ended_badly: false,
            to_release: Vec::new(),
            detaching_since: None,
        };
        self.attachments.insert(token, attachment);
        Ok(Attached { token, rkey, base, slots: SLOTS, slot_bytes: SLOT_BYTES as u32 })
    }

    /// A stream of that peer has been opened. Whether the region is there.
    pub(super) fn begin(&mut self, token: u64) -> bool {
        let known = self.attachments.get_mut(&token).filter(|at| at.detaching_since.is_none());
        let is_known = known.is_some();
        if let Some(attachment) = known {
            attachment.streams += 1;
            attachment.ended_badly = false;
        }
        is_known
    }

    /// Frames of that transfer go there from now on.
    pub(super) fn route(&mut self, token: u64, context: Context, frames: Frames) {
        if let Some(attachment) = self.attachments.get_mut(&token) {
            attachment.routes.push((context, frames));
        }
    }

    /// A stream has ended.
    pub(super) fn end(&mut self, token: u64, context: Option<Context>, committed: bool) {
        let Some(attachment) = self.attachments.get_mut(&token) else { return };
        attachment.routes.retain(|(route, _)| Some(*route) != context);
        attachment.streams = attachment.streams.saturating_sub(1);
        attachment.ended_badly |= !committed;
        attachment.idle_since = Instant::now();
    }

    /// A frame's bytes have been dropped.
    pub(super) fn release(&mut self, token: u64, slot: u16) {
        let Some(attachment) = self.attachments.get_mut(&token) else { return };
        attachment.slots.give(slot);
        attachment.to_release.push(Slot { slot, len: 0 });
    }

    /// Tells peers which slots are theirs again.
    pub(super) fn send_releases(&mut self, worker: &mut Worker) {
        for (&token, attachment) in &mut self.attachments {
            if attachment.to_release.is_empty() {
                continue;
            }
            let slots = std::mem::take(&mut attachment.to_release);
            let header = notice::encode(token, &slots);
            let sent = worker.send(attachment.endpoint, notice::RELEASE, header, Bytes::new());
            if let Err(error) = sent {
                tracing::debug!(%error, node = attachment.node, "slots were not released");
            }
        }
    }

    /// The peer says that it has put frames into slots.
    pub(super) fn on_put(
        &mut self,
        worker: &mut Worker,
        (token, slots): (u64, Vec<Slot>),
        commands: &Commands,
    ) {
        for slot in slots {
            if !self.may_fill(token, slot) {
                return self.on_violation(worker, token, commands.counters());
            }
            self.deliver(token, slot, commands);
        }
    }

    /// The peer offers a frame to be fetched.
    pub(super) fn on_fetch(
        &mut self,
        worker: &mut Worker,
        (token, slots): (u64, Vec<Slot>),
        payload: Payload,
        commands: &Commands,
    ) {
        let slot = match (&slots[..], &payload) {
            (&[slot], Payload::Waits(waiting)) if waiting.len == slot.len as usize => Some(slot),
            (&[slot], Payload::Here(bytes)) if bytes.len() == slot.len as usize => Some(slot),
            _ => None,
        };
        let Some(slot) = slot.filter(|&slot| self.may_fill(token, slot)) else {
            if let Payload::Waits(waiting) = payload {
                worker.refuse(waiting);
            }
            return self.on_violation(worker, token, commands.counters());
        };
        let Some(attachment) = self.attachments.get_mut(&token) else { return };
        match payload {
            // UCX has copied it already; the slot was never written.
            Payload::Here(bytes) => {
                attachment.to_release.push(Slot { len: 0, ..slot });
                attachment.deliver(bytes, commands.counters());
            }
            Payload::Waits(waiting) => {
                attachment.slots.take(slot.slot);
                let offset = usize::from(slot.slot) * SLOT_BYTES;
                match worker.receive(waiting, attachment.region, offset) {
                    Ok(op) => drop(self.fetching.insert(op, (token, slot))),
                    Err(error) => tracing::debug!(%error, "a frame was not fetched"),
                }
            }
        }
    }

    /// Whether that was a fetch of ours, which is over.
    pub(super) fn on_done(
        &mut self,
        op: OpId,
        result: &Result<(), String>,
        commands: &Commands,
    ) -> bool {
        let Some((token, slot)) = self.fetching.remove(&op) else { return false };
        match result {
            Ok(()) => self.deliver(token, slot, commands),
            // The peer has gone; that is told apart.
            Err(reason) => tracing::debug!(reason, "a frame was not fetched"),
        }
        true
    }

    /// Whether the endpoint was one of ours.
    pub(super) fn on_peer_lost(
        &mut self,
        worker: &mut Worker,
        endpoint: EndpointId,
        reason: &str,
        counters: &Counters,
    ) -> bool {
        let found = self.attachments.iter().find(|(_, at)| at.endpoint == endpoint);
        let Some((&token, attachment)) = found else { return false };
        tracing::info!(node = attachment.node, reason, "a UCX sender is gone");
        self.drop_attachment(worker, token, counters);
        true
    }

    /// The peer has said that it writes no more. Whether the token is known.
    pub(super) fn on_detached(
        &mut self,
        worker: &mut Worker,
        token: u64,
        counters: &Counters,
    ) -> bool {
        // The memory itself goes with the last frame that lies in it.
        self.remove(worker, token, counters).is_some()
    }

    /// Gives up what nobody uses.
    pub(super) fn tick(&mut self, worker: &mut Worker, counters: &Counters) {
        let now = Instant::now();
        let mut silent = Vec::new();
        for (&token, attachment) in &mut self.attachments {
            let most = if attachment.ended_badly { IDLE_AFTER_FAILURE } else { IDLE };
            match attachment.detaching_since {
                Some(since) if now - since >= DETACH_WITHIN => silent.push(token),
                None if attachment.streams == 0 && now - attachment.idle_since >= most => {
                    attachment.detaching_since = Some(now);
                    let header = notice::encode(token, &[]);
                    let to = attachment.endpoint;
                    if worker.send(to, notice::DETACH, header, Bytes::new()).is_err() {
                        silent.push(token);
                    }
                }
                Some(_) | None => {}
            }
        }
        for token in silent {
            self.drop_attachment(worker, token, counters);
        }
    }

    /// Ends everything, before the worker goes.
    pub(super) fn clear(&mut self, worker: &mut Worker, counters: &Counters) {
        let tokens: Vec<_> = self.attachments.keys().copied().collect();
        for token in tokens {
            self.drop_attachment(worker, token, counters);
        }
        self.fetching.clear();
    }

    fn may_fill(&self, token: u64, slot: Slot) -> bool {
        self.attachments.get(&token).is_some_and(|attachment| attachment.slots.may_fill(slot))
    }

    fn deliver(&mut self, token: u64, Slot { slot, len }: Slot, commands: &Commands) {
        let Some(attachment) = self.attachments.get_mut(&token) else { return };
        attachment.slots.take(slot);
        let frame = SlotFrame {
            mapping: attachment.mapping.clone(),
            at: usize::from(slot) * SLOT_BYTES,
            len: len as usize,
            token,
            slot,
            commands: commands.clone(),
        };
        attachment.deliver(Bytes::from_owner(frame), commands.counters());
    }

    /// A peer that names places it has not: whatever it is, it may not write here any more.
    fn on_violation(&mut self, worker: &mut Worker, token: u64, counters: &Counters) {
        counters.refused.fetch_add(1, Ordering::Relaxed);
        if let Some(attachment) = self.attachments.get(&token) {
            tracing::warn!(node = attachment.node, "a UCX sender named a slot that is not its own");
            self.drop_attachment(worker, token, counters);
        }
    }

    /// The peer may still write: the addresses stay taken.
    fn drop_attachment(&mut self, worker: &mut Worker, token: u64, counters: &Counters) {
        if let Some(attachment) = self.remove(worker, token, counters) {
            attachment.mapping.fence_when_dropped();
        }
    }

    fn remove(
        &mut self,
        worker: &mut Worker,
        token: u64,
        counters: &Counters,
    ) -> Option<Attachment> {
        let attachment = self.attachments.remove(&token)?;
        worker.close(attachment.endpoint);
        worker.unregister(attachment.region);
        counters.registered_bytes.fetch_sub(attachment.mapping.len() as u64, Ordering::Relaxed);
        Some(attachment)
    }
}

impl Attachment {
    fn deliver(&self, bytes: Bytes, counters: &Counters) {
        let len = bytes.len() as u64;
        let message = match KvMessage::decode(bytes) {
            Ok(message) if matches!(message.body, Body::Frame(_)) => message,
            // As good as lost. Which transfer it was for cannot be trusted.
            Ok(_) | Err(_) => {
                counters.refused.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        let route = self.routes.iter().find(|(context, _)| *context == message.context);
        match route {
            Some((_, frames)) => {
                counters.received_bytes.fetch_add(len, Ordering::Relaxed);
                // Where the stream has just ended, the frame goes with it.
                let _ended = frames.send(Ok(message));
            }
            // Of a transfer that has ended, or of another's.
            None => drop(counters.stale.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

/// The bytes of a frame in its slot.
struct SlotFrame {
    mapping: Arc<Mapping>,
    at: usize,
    len: usize,
    token: u64,
    slot: u16,
    commands: Commands,
}

impl AsRef<[u8]> for SlotFrame {
    fn as_ref(&self) -> &[u8] {
        self.mapping.filled(self.at, self.len)
    }
}

impl Drop for SlotFrame {
    fn drop(&mut self) {
        self.commands.send(Command::Release { token: self.token, slot: self.slot });
    }
}
