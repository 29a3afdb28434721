//! How fast the way to one peer is, and what follows for frames.
//!
//! On a fast link frames are as large as they may be and the receiver's window is the only bound.
//! On a slow one they would lie in queues for seconds, and with them everything that is sent
//! behind them: heartbeats, a cancellation, other transfers' frames. So what is in flight is
//! bounded by time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::frame::PAYLOAD_MAX_BYTES;

/// Messages that take so long, one after the other, have waited behind frames: what arrived between
/// them is all that the link can do.
const QUEUED_MS: u64 = 100;
/// Frames in flight shall take so long at most.
const IN_FLIGHT_S: f64 = 0.15;
/// One frame shall take so long at most.
const FRAME_S: f64 = 0.005;
const FRAME_LEAST_BYTES: usize = 64 << 10;
const WINDOW_LEAST_BYTES: u64 = 4 * FRAME_LEAST_BYTES as u64;
/// A link with so much, in bytes a second, is bounded by nothing here.
const FAST: f64 = 250e6;
/// What a link is tried with that has no queue any more.
const FASTER: f64 = 1.25;

/// What is slow for a while, as a peer that was stopped, is not slow for ever.
const KNOWN_FOR: Duration = Duration::from_secs(10);

/// What is known of the way to one peer. All transfers to it share it.
#[derive(Debug, Default)]
pub struct LinkPace(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// None while the link has not been what limits.
    bytes_per_s: Option<f64>,
    seen: Option<Instant>,
    /// The last message was queued: one alone says that somebody was held up for a moment.
    was_queued: bool,
}

impl LinkPace {
    /// Bytes a second; none where the link has not been what limits.
    pub fn bytes_per_s(&self) -> Option<f64> {
        self.known().bytes_per_s
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.seen.is_some_and(|seen| seen.elapsed() >= KNOWN_FOR) {
            *known = Known::default();
        }
        known
    }

    /// Payload that may be on its way.
    pub fn window_bytes(&self) -> u64 {
        let window = |known| ((known * IN_FLIGHT_S) as u64).max(WINDOW_LEAST_BYTES);
        self.bytes_per_s().map_or(u64::MAX, window)
    }

    /// Most payload of one frame.
    pub fn frame_bytes(&self) -> usize {
        let Some(known) = self.bytes_per_s() else { return PAYLOAD_MAX_BYTES };
        let most = ((known * FRAME_S) as usize).clamp(FRAME_LEAST_BYTES, PAYLOAD_MAX_BYTES);
        1 << most.ilog2()
    }

    /// The link has moved `bytes` in `ms`. `delay_ms` is how long a message took to the other end
    /// and back; `was_bound`: more would have been sent, but for what
    /// [`window_bytes`](Self::window_bytes) says.
    pub fn observe(&self, bytes: u64, ms: u64, delay_ms: u64, was_bound: bool) {
        let mut known = self.known();
        let is_queued = delay_ms >= QUEUED_MS;
        let was_queued = std::mem::replace(&mut known.was_queued, is_queued);
        // After a stall answers come together, and say nothing of the link.
        let says_all = is_queued && was_queued && ms >= QUEUED_MS && bytes > 0;
        let bytes_per_s = match known.bytes_per_s {
            _ if says_all => bytes as f64 * 1e3 / ms as f64,
            Some(known) if was_bound && !is_queued => known * FASTER,
            _ => return,
        };
        known.bytes_per_s = (bytes_per_s < FAST).then_some(bytes_per_s);
        known.seen = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fast_is_not_bound() {
        let pace = LinkPace::default();
        let fast = [(64 << 20, 333, 1), (0, 333, 500), (1 << 30, 333, 200), (1 << 30, 333, 200)];
        for (bytes, ms, delay_ms) in fast {
            pace.observe(bytes, ms, delay_ms, true);
            assert_eq!(pace.bytes_per_s(), None);
        }
        assert_eq!((pace.window_bytes(), pace.frame_bytes()), (u64::MAX, 1 << 20));
    }

    /// A peer that stands still for a moment answers everything at once.
    #[test]
    fn a_stall_is_no_slow_link() {
        let pace = LinkPace::default();
        for delays in [[420, 87, 1], [900, 567, 234], [150, 1, 150]] {
            for (at, delay_ms) in delays.into_iter().enumerate() {
                let ms = if at == 0 { 753 } else { 0 };
                pace.observe(400_000, ms, delay_ms, true);
                assert_eq!(pace.bytes_per_s(), None, "{delays:?}");
            }
            pace.observe(400_000, 333, 1, true);
        }
    }

    #[test]
    fn a_slow_link_has_small_frames_and_a_short_queue() {
        let pace = LinkPace::default();
        pace.observe(4_000_000, 333, 500, false);
        pace.observe(4_000_000, 333, 900, false);
        assert_eq!(pace.bytes_per_s().map(f64::round), Some(12_012_012.0));
        assert_eq!((pace.window_bytes(), pace.frame_bytes()), (1_801_801, 64 << 10));
        // No queue, but nothing that would have made one either.
        pace.observe(100_000, 333, 1, false);
        assert_eq!(pace.window_bytes(), 1_801_801);
        (0..5).for_each(|_| pace.observe(4_000_000, 333, 1, true));
        assert_eq!(pace.frame_bytes(), 128 << 10);
        (0..20).for_each(|_| pace.observe(4_000_000, 333, 1, true));
        assert_eq!(pace.bytes_per_s(), None);
        pace.observe(1, 1_000, 2_000, true);
        pace.observe(1, 1_000, 2_000, true);
        assert_eq!((pace.window_bytes(), pace.frame_bytes()), (256 << 10, 64 << 10));
    }
}
