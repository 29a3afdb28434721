//! How fast the way to one peer is, and what follows for frames.
//!
//! On a fast link frames are as large as they may be and the receiver's window is the only bound.
//! On a slow one they would lie in queues for seconds, and with them everything that is sent
//! behind them: heartbeats, a cancellation, other transfers' frames. So what is in flight is
//! bounded by time.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::frame::PAYLOAD_MAX_BYTES;

/// A message that takes so long has waited behind frames: what arrived until then is all that the
/// link can do.
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

/// What is known of the way to one peer. All transfers to it share it.
#[derive(Debug, Default)]
pub struct LinkPace {
    /// As f64; 0 while the link has not been what limits.
    bytes_per_s: AtomicU64,
}

impl LinkPace {
    /// Bytes a second; none where the link has not been what limits.
    pub fn bytes_per_s(&self) -> Option<f64> {
        let known = f64::from_bits(self.bytes_per_s.load(Ordering::Relaxed));
        (known > 0.0).then_some(known)
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
        let known = match (delay_ms >= QUEUED_MS, self.bytes_per_s()) {
            (true, _) if bytes > 0 => bytes as f64 * 1e3 / ms.max(1) as f64,
            (false, Some(known)) if was_bound => known * FASTER,
            _ => return,
        };
        let known = if known >= FAST { 0.0 } else { known };
        self.bytes_per_s.store(known.to_bits(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fast_is_not_bound() {
        let pace = LinkPace::default();
        for (bytes, ms, delay_ms) in [(64 << 20, 333, 1), (0, 333, 500), (1 << 30, 333, 200)] {
            pace.observe(bytes, ms, delay_ms, true);
            assert_eq!(pace.bytes_per_s(), None);
        }
        assert_eq!((pace.window_bytes(), pace.frame_bytes()), (u64::MAX, 1 << 20));
    }

    #[test]
    fn a_slow_link_has_small_frames_and_a_short_queue() {
        let pace = LinkPace::default();
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
        assert_eq!((pace.window_bytes(), pace.frame_bytes()), (256 << 10, 64 << 10));
    }
}
