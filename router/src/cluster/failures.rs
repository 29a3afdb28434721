//! Which nodes a node could not work with of late.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// After so many failures in a row the time for which two are left apart grows no more.
const DOUBLED_MOST: u32 = 4;

/// By the other node. After a failure the two are left apart for a while, doubled with each failure
/// in a row, up to sixteen times.
#[derive(Debug)]
pub(super) struct Failures<K> {
    first: Duration,
    failed: HashMap<K, Failed>,
}

#[derive(Clone, Copy, Debug)]
struct Failed {
    count: u32,
    until: Instant,
}

impl<K: Clone + Eq + Hash> Failures<K> {
    /// None so far; the first keeps the two apart for so long.
    pub(super) fn new(first: Duration) -> Self {
        Self { first, failed: HashMap::new() }
    }

    /// How it went with `other`. What fails while the two are left apart began before, and counts
    /// once.
    pub(super) fn note(&mut self, other: &K, failed: bool, now: Instant) {
        if !failed {
            self.failed.remove(other);
            return;
        }
        if !self.may_try(other, now) {
            return;
        }
        // Long past: the other one may be gone for good.
        let most = self.first * (1 << DOUBLED_MOST);
        self.failed.retain(|_, failed| failed.until + most > now);
        let count = self.failed.get(other).map_or(0, |failed| failed.count);
        let until = now + self.first * (1 << count.min(DOUBLED_MOST));
        self.failed.insert(other.clone(), Failed { count: count + 1, until });
    }

    pub(super) fn may_try(&self, other: &K, now: Instant) -> bool {
        self.failed.get(other).is_none_or(|failed| failed.until <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_nodes_are_left_apart_for_longer_each_time_until_it_goes_well() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut failures = Failures::new(second);
        // Four at once are one.
        (0..4).for_each(|_| failures.note(&"d1", true, start));
        assert!(!failures.may_try(&"d1", start) && failures.may_try(&"d2", start));
        assert!(failures.may_try(&"d1", start + second));
        failures.note(&"d1", true, start + second);
        assert!(!failures.may_try(&"d1", start + second * 2));
        assert!(failures.may_try(&"d1", start + second * 3));
        failures.note(&"d1", false, start + second * 3);
        failures.note(&"d1", true, start + second * 3);
        assert!(failures.may_try(&"d1", start + second * 4));
        failures.note(&"d2", true, start + second * 60);
        assert_eq!(failures.failed.len(), 1, "what is long past is let go");
    }
}
