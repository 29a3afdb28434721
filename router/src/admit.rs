//! The bounded queue before everything that costs something.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_types::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::RouterConfig;

/// Lets so many requests run and so many wait; the rest are told when to come back.
#[derive(Clone, Debug)]
pub struct Admission(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    places: Arc<Semaphore>,
    max_running: usize,
    max_waiting: usize,
    timeout: Duration,
    waiting: AtomicUsize,
}

/// A place among the running; given back when dropped.
#[derive(Debug)]
pub struct Permit {
    _place: OwnedSemaphorePermit,
}

struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Admission {
    pub fn new(config: &RouterConfig) -> Self {
        Self(Arc::new(Shared {
            places: Arc::new(Semaphore::new(config.max_running)),
            max_running: config.max_running,
            max_waiting: config.max_waiting,
            timeout: Duration::from_millis(config.queue_timeout_ms),
            waiting: AtomicUsize::new(0),
        }))
    }

    /// Waits for a place, first come first served. Cancel safe.
    ///
    /// # Errors
    /// `ResourceExhausted` where the queue is full or no place came free in time.
    pub async fn enter(&self) -> Result<Permit, Error> {
        let shared = &self.0;
        if let Ok(place) = shared.places.clone().try_acquire_owned() {
            return Ok(Permit { _place: place });
        }
        let before = shared.waiting.fetch_add(1, Ordering::AcqRel);
        let _waiting = Waiting(&shared.waiting);
        if before >= shared.max_waiting {
            return Err(Error::exhausted(
                format!(
                    "{} requests run and {} wait already",
                    shared.max_running, shared.max_waiting
                ),
                1_000,
            ));
        }
        match tokio::time::timeout(shared.timeout, shared.places.clone().acquire_owned()).await {
            Ok(Ok(place)) => Ok(Permit { _place: place }),
            Ok(Err(_)) => Err(Error::internal("the queue was closed")),
            Err(_) => Err(Error::exhausted(
                format!("no place came free within {} ms", shared.timeout.as_millis()),
                1_000,
            )),
        }
    }

    pub fn running(&self) -> usize {
        self.0.max_running - self.0.places.available_permits()
    }

    pub fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::ErrorCode;

    fn admission(max_running: usize, max_waiting: usize, queue_timeout_ms: u64) -> Admission {
        let config =
            RouterConfig { max_running, max_waiting, queue_timeout_ms, ..RouterConfig::default() };
        Admission::new(&config)
    }

    #[tokio::test]
    async fn who_does_not_fit_waits_and_who_cannot_wait_is_told_when_to_return() {
        let admission = admission(1, 1, 60_000);
        let first = admission.enter().await.unwrap();
        let waits = tokio::spawn({
            let admission = admission.clone();
            async move { admission.enter().await }
        });
        while admission.waiting() == 0 {
            tokio::task::yield_now().await;
        }
        let error = admission.enter().await.unwrap_err();
        assert_eq!(error.code, ErrorCode::ResourceExhausted);
        assert!(error.retry_after_ms.is_some());
        drop(first);
        drop(waits.await.unwrap().unwrap());
        assert_eq!((admission.running(), admission.waiting()), (0, 0));
    }

    #[tokio::test]
    async fn waiting_ends_in_time() {
        let admission = admission(1, 1, 10);
        let _first = admission.enter().await.unwrap();
        let error = admission.enter().await.unwrap_err();
        assert_eq!(error.code, ErrorCode::ResourceExhausted);
        assert_eq!(admission.waiting(), 0);
    }
}
