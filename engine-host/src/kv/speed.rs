//! How fast this node's cache goes to other nodes.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Less says more of the calls than of the link.
const LEAST_BYTES: u64 = 1 << 20;
/// What is older is forgotten: a node that was slow once must be tried again.
const KNOWN_FOR: Duration = Duration::from_secs(60);

/// Measured over the last sends; the newest counts half.
#[derive(Debug, Default)]
pub struct SendSpeed(Mutex<Option<(f64, Instant)>>);

impl SendSpeed {
    pub fn observe(&self, bytes: u64, took: Duration) {
        if bytes < LEAST_BYTES {
            return;
        }
        let now = bytes as f64 / took.as_secs_f64().max(1e-6);
        let known = self.bytes_per_s();
        let mean = if known > 0.0 { (known + now) / 2.0 } else { now };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((mean, Instant::now()));
    }

    /// 0 where nothing is known.
    pub fn bytes_per_s(&self) -> f64 {
        let known = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.filter(|(_, at)| at.elapsed() < KNOWN_FOR).map_or(0.0, |(speed, _)| speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_counts_half_and_little_ones_nothing() {
        let speed = SendSpeed::default();
        speed.observe(LEAST_BYTES - 1, Duration::from_secs(1));
        assert_eq!(speed.bytes_per_s(), 0.0);
        speed.observe(100 << 20, Duration::from_secs(1));
        speed.observe(300 << 20, Duration::from_secs(1));
        assert_eq!(speed.bytes_per_s(), f64::from(200 << 20));
    }
}
