//! Frames on their way: bounded by the receiver's credit and by the link's pace.

use std::collections::{BTreeMap, VecDeque};

use crate::digest::FrameDigest;
use crate::frame::{Frame, FrameKey};
use crate::pace::LinkPace;

/// Frames on their way, and the credit for them.
#[derive(Debug, Default)]
pub(super) struct Flow {
    pub granted_bytes: u64,
    /// Of it, what was there at first.
    pub window_bytes: u64,
    pub spent_bytes: u64,
    pub queue: VecDeque<Frame>,
    pub queued_bytes: usize,
    /// The link's pace has held frames back since the last heartbeat was answered.
    was_bound: bool,
    /// Sent, and not yet known to be in place; true where it was sent again.
    pub retained: BTreeMap<FrameKey, (Frame, bool)>,
    pub digest: FrameDigest,
    probes: Probes,
}

/// Heartbeats as measures of the link, where they travel behind the frames: they are answered at
/// once.
#[derive(Debug, Default)]
struct Probes {
    are_wanted: bool,
    /// Sequence, when it was sent, and how much payload before it.
    sent: VecDeque<(u32, u64, u64)>,
    /// When the last answer came, and how much payload had arrived by then.
    answered: (u64, u64),
}

impl Flow {
    /// The next frame, where credit allows it and, beside others, no more than `most_bytes` are in
    /// flight then.
    pub fn next_under_credit(&mut self, most_bytes: u64) -> Option<Frame> {
        let bytes = self.queue.front()?.payload().len();
        if self.spent_bytes + bytes as u64 > self.granted_bytes {
            return None;
        }
        let in_flight = self.in_flight_bytes();
        if in_flight > 0 && in_flight + bytes as u64 > most_bytes {
            self.was_bound = true;
            return None;
        }
        self.spent_bytes += bytes as u64;
        self.queued_bytes -= bytes;
        let frame = self.queue.pop_front()?;
        self.retained.insert(frame.key(), (frame.clone(), false));
        Some(frame)
    }

    /// Payload that is sent and, as far as credit and answered heartbeats say, has not arrived:
    /// what waits for its place at the receiver is on no link.
    fn in_flight_bytes(&self) -> u64 {
        let placed = self.granted_bytes - self.window_bytes;
        self.spent_bytes.saturating_sub(placed.max(self.probes.answered.1))
    }

    /// The receiver has accepted, with so much credit; `is_probed`: heartbeats follow the frames.
    pub fn begin(&mut self, granted_bytes: u64, now_ms: u64, is_probed: bool) {
        self.granted_bytes = self.granted_bytes.max(granted_bytes);
        self.window_bytes = granted_bytes;
        self.probes.answered.0 = now_ms;
        self.probes.are_wanted = is_probed;
    }

    /// A heartbeat is sent behind what was sent so far.
    pub fn probe(&mut self, sequence: u32, now_ms: u64) {
        if self.probes.are_wanted {
            self.probes.sent.push_back((sequence, now_ms, self.spent_bytes));
        }
    }

    /// A heartbeat is answered: what was sent before it has arrived.
    pub fn probed(&mut self, sequence: u32, now_ms: u64, pace: &LinkPace) {
        let sent = &mut self.probes.sent;
        let at = sent.iter().position(|&(known, ..)| known == sequence);
        let Some((_, sent_ms, bytes)) = at.and_then(|at| sent.drain(..=at).next_back()) else {
            return;
        };
        let (last_ms, last_bytes) = std::mem::replace(&mut self.probes.answered, (now_ms, bytes));
        let (took_ms, delay_ms) = (now_ms.saturating_sub(last_ms), now_ms.saturating_sub(sent_ms));
        let was_bound = std::mem::take(&mut self.was_bound);
        pace.observe(bytes - last_bytes, took_ms, delay_ms, was_bound);
    }
}
