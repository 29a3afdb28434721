//! Requests that were cancelled before they were known here: a router that gives up on `Reserve`
//! sends `Cancel` after it, and the two may be served in either order.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use baton_types::RequestId;

/// A call that has not been served after so long never will be.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);

/// Beyond it the oldest are forgotten; their reservations then expire with their grants.
const REMEMBERED_MAX: usize = 16_384;

#[derive(Debug, Default)]
pub(crate) struct Cancelled {
    ids: HashSet<RequestId>,
    oldest_first: VecDeque<(Instant, RequestId)>,
}

impl Cancelled {
    pub fn remember(&mut self, id: RequestId, now: Instant) {
        let is_old = |&(since, _): &(Instant, RequestId)| now - since > REMEMBERED_FOR;
        while self.oldest_first.front().is_some_and(is_old)
            || self.oldest_first.len() >= REMEMBERED_MAX
        {
            if let Some((_, id)) = self.oldest_first.pop_front() {
                self.ids.remove(&id);
            }
        }
        if self.ids.insert(id) {
            self.oldest_first.push_back((now, id));
        }
    }

    pub fn contains(&self, id: RequestId) -> bool {
        self.ids.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_and_the_surplus_are_forgotten() {
        let id = |n: usize| RequestId((n as u128).to_le_bytes());
        let mut cancelled = Cancelled::default();
        let now = Instant::now();
        for n in 0..=REMEMBERED_MAX {
            cancelled.remember(id(n), now);
        }
        assert!(!cancelled.contains(id(0)) && cancelled.contains(id(1)));
        cancelled.remember(id(1), now + 2 * REMEMBERED_FOR);
        assert!(cancelled.contains(id(1)) && !cancelled.contains(id(2)));
        assert_eq!(cancelled.oldest_first.len(), 1);
    }
}
