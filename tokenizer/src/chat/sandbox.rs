//! A thread for code that a model file brings along.
//!
//! The template engine counts steps and bytes, but it recurses as deep as a template nests its
//! values, and a few of its operators walk values without counting. So templates run on a thread
//! of their own, with a deep stack, and are waited for until a deadline.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

/// Address space, not memory: only what is touched becomes resident.
const STACK_BYTES: usize = 1 << 30;

/// Why there is no result.
#[derive(Debug)]
pub(super) enum SandboxError {
    /// Not done before the deadline, or still busy with work that was not.
    Overdue,
    /// The work panicked; the panic hook has told where.
    Panicked,
    /// The system gives no thread.
    NoThread(io::Error),
}

/// Runs one model's templates. While one of them is overdue no other starts, so that at most one
/// runaway thread burns a core.
#[derive(Debug)]
pub(super) struct Sandbox {
    max_time: Duration,
    /// Alive as long as overdue work is.
    overdue: Mutex<Weak<()>>,
}

impl Sandbox {
    pub(super) fn new(max_time: Duration) -> Self {
        Self { max_time, overdue: Mutex::default() }
    }

    /// # Errors
    /// When the work does not end within the time, or panics.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, SandboxError> {
        let overdue = || self.overdue.lock().unwrap_or_else(PoisonError::into_inner);
        if overdue().strong_count() > 0 {
            return Err(SandboxError::Overdue);
        }
        let alive = Arc::new(());
        let busy = Arc::downgrade(&alive);
        let (sender, receiver) = sync_channel(1);
        let body = move || {
            let done = work();
            drop(alive);
            // Nobody listens any more when the work was overdue.
            let _ = sender.send(done);
        };
        thread::Builder::new()
            .name("chat-template".into())
            .stack_size(STACK_BYTES)
            .spawn(body)
            .map_err(SandboxError::NoThread)?;
        receiver.recv_timeout(self.max_time).map_err(|error| match error {
            RecvTimeoutError::Disconnected => SandboxError::Panicked,
            RecvTimeoutError::Timeout => {
                *overdue() = busy;
                SandboxError::Overdue
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_hangs_or_panics_is_reported() {
        // Printing a panic with its backtrace may take its time.
        let patient = Sandbox::new(Duration::from_secs(60));
        let panicked = patient.run(|| assert!(sandbox_is_calm(), "as the test wants"));
        assert!(matches!(panicked, Err(SandboxError::Panicked)));
        assert_eq!(patient.run(|| 7).unwrap(), 7);
        let sandbox = Sandbox::new(Duration::from_millis(200));
        let (release, wait) = sync_channel::<()>(0);
        let hung = sandbox.run(move || wait.recv().is_ok());
        assert!(matches!(hung, Err(SandboxError::Overdue)));
        assert!(matches!(sandbox.run(|| 7), Err(SandboxError::Overdue)));
        release.send(()).unwrap();
        while sandbox.run(|| 7).is_err() {
            thread::yield_now();
        }
    }

    fn sandbox_is_calm() -> bool {
        false
    }
}
