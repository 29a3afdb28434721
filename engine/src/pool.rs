//! Threads that run one stage of a step together.
//!
//! A stage is a closure that every thread calls once with its number; `run` returns when all have
//! finished, so a stage's end is the barrier. Between stages threads spin for a while and then
//! sleep: a stage takes microseconds, and waking a sleeper takes tens of them. But two engines
//! that spin on the same cores take them from one another. So the pool watches itself: when its
//! own thread waits too long for short stages, several times in a row, the workers have no cores
//! of their own, and for the next stages nobody spins.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins for the next stage, and the caller for the end of one.
const WORKER_SPIN: Duration = Duration::from_micros(300);
const CALLER_SPIN: Duration = Duration::from_micros(100);
/// Spins between two looks at the clock.
const SPINS_PER_LOOK: u32 = 32;
/// After so many short stages in a row whose end was late ...
const LATE_STAGES: u32 = 8;
/// ... nobody spins for so many stages.
const CALM_STAGES: u32 = 2000;

/// For so few rows a stage that takes a microsecond a row is not worth a barrier.
const FEW_ROWS: usize = 2;

/// Whether threads may spin while they wait for one another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpinPolicy {
    /// Spin while it pays; never with more threads than cores.
    #[default]
    Auto,
    /// Always sleep: several engines share the cores.
    Never,
}

type Stage<'a> = dyn Fn(usize) + Sync + 'a;

/// `threads - 1` workers and the thread that calls `run`.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Counts stages; a change of it starts one.
    epoch: AtomicU32,
    /// Workers that have not yet finished the stage.
    running: AtomicUsize,
    stage: UnsafeCell<Option<*const Stage<'static>>>,
    /// Whether the policy lets threads spin at all.
    may_spin: bool,
    /// Stages for which nobody spins.
    calm: AtomicU32,
    /// Short stages in a row that ended late.
    late: AtomicU32,
    /// Workers that sleep, and whether the caller does.
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    start: Condvar,
    finish: Condvar,
    quit: AtomicBool,
    failed: AtomicBool,
}

// SAFETY: `stage` is written by the caller while no worker runs, and read by workers after they
// have seen the new epoch, which was stored after it.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is only followed during `run`.
unsafe impl Send for Shared {}

impl Pool {
    /// # Errors
    /// When the system has no more threads.
    pub(crate) fn new(threads: usize, policy: SpinPolicy) -> std::io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            running: AtomicUsize::new(0),
            stage: UnsafeCell::new(None),
            may_spin: policy == SpinPolicy::Auto && threads <= cores,
            calm: AtomicU32::new(0),
            late: AtomicU32::new(0),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            start: Condvar::new(),
            finish: Condvar::new(),
            quit: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let name = format!("baton-engine-{thread}");
            let builder = std::thread::Builder::new().name(name);
            pool.workers.push(builder.spawn(move || shared.work(thread))?);
        }
        Ok(pool)
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// A stage that takes about a microsecond for each of `rows` rows: for a few of them the caller
    /// does all threads' parts itself.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub(crate) fn run_rows(&mut self, rows: usize, stage: &Stage<'_>) {
        if rows <= FEW_ROWS {
            (0..self.threads()).for_each(stage);
        } else {
            self.run(stage);
        }
    }

    /// Calls `stage(0)` here and `stage(1..threads)` on the workers, and waits for all.
    ///
    /// # Panics
    /// When the stage panicked on a worker.
    pub(crate) fn run(&mut self, stage: &Stage<'_>) {
        if self.workers.is_empty() {
            return stage(0);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers follow the pointer before they decrement
        // `running`, and this function does not return (or unwind, see `Finish`) until it is zero.
        let stage_ptr = unsafe {
            std::mem::transmute::<*const Stage<'_>, *const Stage<'static>>(std::ptr::from_ref(
                stage,
            ))
        };
        // SAFETY: no worker runs (`running` is zero), so nobody reads the cell.
        unsafe { *shared.stage.get() = Some(stage_ptr) };
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = shared.guard();
            shared.start.notify_all();
        }
        let finish = Finish(shared, Instant::now());
        stage(0);
        drop(finish);
        assert!(!shared.failed.load(Ordering::Relaxed), "a worker of the engine's pool panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        {
            let _guard = self.shared.guard();
            self.shared.start.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker's panic was already reported by `run`.
            let _ = worker.join();
        }
    }
}

/// Waits for the workers, also when the caller's own part panics: they hold its references.
struct Finish<'a>(&'a Shared, Instant);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.wait_for_workers(self.1);
    }
}

impl Shared {
    fn work(&self, thread: usize) {
        let mut seen = 0;
        loop {
            self.wait_for_stage(seen);
            seen = self.epoch.load(Ordering::SeqCst);
            if self.quit.load(Ordering::SeqCst) {
                return;
            }
            // SAFETY: written before the epoch that was seen; not written again until `running`
            // is zero, that is after this worker has finished.
            let stage = unsafe { (*self.stage.get()).expect("an epoch comes with a stage") };
            // SAFETY: `run` keeps the closure alive until `running` is zero.
            let stage = unsafe { &*stage };
            let run = std::panic::AssertUnwindSafe(|| stage(thread));
            if std::panic::catch_unwind(run).is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            if self.running.fetch_sub(1, Ordering::SeqCst) == 1
                && self.caller_sleeps.load(Ordering::SeqCst)
            {
                let _guard = self.guard();
                self.finish.notify_one();
            }
        }
    }

    fn wait_for_stage(&self, seen: u32) {
        if self.spin(WORKER_SPIN, || self.epoch.load(Ordering::Acquire) != seen) {
            return;
        }
        let mut guard = self.guard();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.epoch.load(Ordering::SeqCst) == seen {
            guard = self.start.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits for the end of a stage that began at `start`.
    fn wait_for_workers(&self, start: Instant) {
        let is_short = start.elapsed() < CALLER_SPIN;
        if self.spin(CALLER_SPIN, || self.running.load(Ordering::Acquire) == 0) {
            self.late.store(0, Ordering::Relaxed);
            return;
        }
        self.calm_down(is_short);
        let mut guard = self.guard();
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while self.running.load(Ordering::SeqCst) != 0 {
            guard = self.finish.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    /// Spins until `is_done`, for at most `limit`; whether it was done.
    fn spin(&self, limit: Duration, is_done: impl Fn() -> bool) -> bool {
        if is_done() {
            return true;
        }
        if !self.may_spin || self.calm.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let start = Instant::now();
        loop {
            for _ in 0..SPINS_PER_LOOK {
                if is_done() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > limit {
                return false;
            }
        }
    }

    /// Counts a stage whose end the caller did not see while it spun.
    fn calm_down(&self, is_short: bool) {
        let calm = self.calm.load(Ordering::Relaxed);
        if calm > 0 {
            self.calm.store(calm - 1, Ordering::Relaxed);
        } else if is_short && self.late.fetch_add(1, Ordering::Relaxed) + 1 >= LATE_STAGES {
            self.late.store(0, Ordering::Relaxed);
            self.calm.store(CALM_STAGES, Ordering::Relaxed);
        }
    }

    fn guard(&self) -> std::sync::MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of `0..count` that is `thread`'s.
pub(crate) fn share(count: usize, threads: usize, thread: usize) -> std::ops::Range<usize> {
    count * thread / threads..count * (thread + 1) / threads
}

/// Pieces of `0..count` that threads take as they become free.
pub(crate) struct Pieces {
    next: AtomicUsize,
    count: usize,
    piece: usize,
}

impl Pieces {
    /// Pieces of `piece` each (the last may be smaller).
    pub(crate) fn new(count: usize, piece: usize) -> Self {
        Self { next: AtomicUsize::new(0), count, piece: piece.max(1) }
    }

    /// The next piece that nobody has taken.
    pub(crate) fn take(&self) -> Option<std::ops::Range<usize>> {
        let start = self.next.fetch_add(self.piece, Ordering::Relaxed);
        (start < self.count).then(|| start..(start + self.piece).min(self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts_everything(threads: usize, policy: SpinPolicy) {
        let mut pool = Pool::new(threads, policy).unwrap();
        let total = AtomicUsize::new(0);
        for _ in 0..200 {
            let pieces = Pieces::new(100, 7);
            pool.run(&|_| {
                while let Some(piece) = pieces.take() {
                    total.fetch_add(piece.len(), Ordering::Relaxed);
                }
            });
        }
        assert_eq!(total.load(Ordering::Relaxed), 20_000);
    }

    #[test]
    fn every_piece_once() {
        for threads in [1, 2, 3, 8] {
            counts_everything(threads, SpinPolicy::Auto);
            counts_everything(threads, SpinPolicy::Never);
        }
    }

    #[test]
    fn few_rows_are_the_callers() {
        let mut pool = Pool::new(3, SpinPolicy::Never).unwrap();
        for rows in [0, 1, 2, 3, 40] {
            let (done, here) = (AtomicUsize::new(0), std::thread::current().id());
            pool.run_rows(rows, &|thread| {
                done.fetch_add(share(rows, 3, thread).len(), Ordering::Relaxed);
                assert!(rows > FEW_ROWS || std::thread::current().id() == here);
            });
            assert_eq!(done.load(Ordering::Relaxed), rows);
        }
    }

    #[test]
    #[should_panic(expected = "worker of the engine's pool")]
    fn a_workers_panic_reaches_the_caller() {
        let mut pool = Pool::new(2, SpinPolicy::Auto).unwrap();
        pool.run(&|thread| assert_eq!(thread, 0, "on purpose"));
    }

    #[test]
    fn shares_cover() {
        let covered: usize = (0..3).map(|thread| share(10, 3, thread).len()).sum();
        assert_eq!(covered, 10);
    }
}
