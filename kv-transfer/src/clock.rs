//! The drivers' monotonic clock.

use std::time::Duration;

use tokio::time::Instant;

/// Milliseconds since it was made; one for each process, shared with its [`GrantMinter`]'s user.
///
/// [`GrantMinter`]: crate::grant::GrantMinter
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    pub fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// The moment at `at_ms`, or one far away where there is none.
    pub(crate) fn instant(&self, at_ms: u64) -> Instant {
        const FAR_MS: u64 = 365 * 24 * 3600 * 1000;
        self.start + Duration::from_millis(at_ms.min(FAR_MS))
    }
}
