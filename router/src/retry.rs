//! Bounds retries: a fifth of the requests, so that trouble does not multiply itself.

use std::sync::atomic::{AtomicI64, Ordering};

/// Retries, in fifths of one: what each request brings, what is there at the start, at most.
const DEPOSIT: i64 = 1;
const PRICE: i64 = 5;
const START: i64 = 10 * PRICE;
const MOST: i64 = 100 * PRICE;

/// Shared by all requests. The recovery from a node's death is not drawn from it.
#[derive(Debug)]
pub struct RetryBudget(AtomicI64);

impl Default for RetryBudget {
    fn default() -> Self {
        Self(AtomicI64::new(START))
    }
}

impl RetryBudget {
    /// A request has come.
    pub fn deposit(&self) {
        self.update(|left| Some((left + DEPOSIT).min(MOST)));
    }

    /// Whether one retry may be made.
    pub fn withdraw(&self) -> bool {
        self.update(|left| (left >= PRICE).then_some(left - PRICE))
    }

    fn update(&self, change: impl FnMut(i64) -> Option<i64>) -> bool {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifth_of_the_requests_may_be_retried() {
        let budget = RetryBudget::default();
        while budget.withdraw() {}
        for _ in 0..100 {
            budget.deposit();
        }
        assert_eq!((0..100).filter(|_| budget.withdraw()).count(), 20);
    }
}
