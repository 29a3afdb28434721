//! How a load gets on, in the log.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_engine::load::{LoadEvent, LoadObserver, LoadProgress, LoadStage};

/// Between two lines of progress, and before the first: what is quick needs none.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Lines of progress have a target of their own: `BATON_LOG=warn,load_progress=info` shows them.
const TARGET: &str = "load_progress";

/// Writes what a load tells to the log: events at once, progress every two seconds with the
/// fields `stage`, `percent`, `done_bytes` and `total_bytes`.
#[derive(Debug)]
pub struct LoadLog {
    told: Mutex<Instant>,
}

impl Default for LoadLog {
    fn default() -> Self {
        Self { told: Mutex::new(Instant::now()) }
    }
}

impl LoadLog {
    /// One line for one event.
    pub fn tell(event: &LoadEvent) {
        match event {
            LoadEvent::Mapped { path, bytes, was_there: true } => {
                tracing::info!(path = %path.display(), bytes, "packed weights are mapped");
            }
            LoadEvent::Mapped { path, bytes, was_there: false } => {
                tracing::info!(path = %path.display(), bytes, "packed weights were written");
            }
            LoadEvent::Copied { path, huge_bytes } => tracing::info!(
                path = %path.display(),
                huge_bytes,
                "packed weights are copied into huge pages of this process's own, since the \
                 file's are small; weights_memory = \"shared\" saves the memory"
            ),
            LoadEvent::Refused { path, reason } => {
                tracing::warn!("packed weights in {} are not taken: {reason}", path.display());
            }
            LoadEvent::NotWritten { path, reason } => {
                tracing::warn!("packed weights cannot be kept in {}: {reason}", path.display());
            }
            LoadEvent::InMemory => tracing::warn!(
                "the weights are packed in this process's own memory, and again at every start; \
                 set weights_cache to a folder that can be written, or to off"
            ),
        }
    }
}

impl LoadObserver for LoadLog {
    fn progress(&self, progress: LoadProgress) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.elapsed() < LINE_EVERY {
            return;
        }
        *told = Instant::now();
        let LoadProgress { stage, done_bytes, total_bytes } = progress;
        if stage == LoadStage::Waiting {
            tracing::info!(target: TARGET, stage = stage.as_str(), "loading the model");
            return;
        }
        let (stage, percent) = (stage.as_str(), progress.percent());
        tracing::info!(
            target: TARGET,
            stage,
            percent,
            done_bytes,
            total_bytes,
            "loading the model"
        );
    }

    fn event(&self, event: &LoadEvent) {
        Self::tell(event);
    }
}
