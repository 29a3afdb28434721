//! How a load gets on, for people at a terminal; for all others in the log.

use std::time::Duration;

use baton_engine::load::{LoadEvent, LoadObserver, LoadProgress, LoadStage};
use baton_engine_host::LoadLog;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// The log's level for commands whose output shall stand out.
pub const LOG_LEVEL: &str = "warn,load_progress=info";

/// A bar on standard error, where that is a terminal.
#[derive(Debug)]
pub struct LoadBar {
    bar: ProgressBar,
    log: LoadLog,
}

impl LoadBar {
    pub fn new() -> Self {
        Self::around(ProgressBar::no_length())
    }

    /// A bar among others.
    pub fn among(bars: &MultiProgress, name: &'static str) -> Self {
        Self::around(bars.add(ProgressBar::no_length()).with_prefix(name))
    }

    fn around(bar: ProgressBar) -> Self {
        let style = ProgressStyle::with_template(
            "{spinner} {prefix} {msg} {wide_bar} {percent:>3} % of {total_bytes}",
        );
        bar.set_style(style.expect("the template is well-formed"));
        bar.set_message("loading the model");
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar, log: LoadLog::default() }
    }

    /// The load is over; the bar says what is done next until it is finished.
    pub fn begin(&self, what: impl Into<std::borrow::Cow<'static, str>>) {
        self.bar.set_style(ProgressStyle::default_spinner());
        self.bar.set_message(what);
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl LoadObserver for LoadBar {
    fn progress(&self, progress: LoadProgress) {
        if self.bar.is_hidden() {
            return self.log.progress(progress);
        }
        self.bar.set_message(progress.stage.as_str());
        if progress.stage != LoadStage::Waiting {
            self.bar.set_length(progress.total_bytes);
            self.bar.set_position(progress.done_bytes);
        }
    }

    fn event(&self, event: &LoadEvent) {
        self.bar.suspend(|| LoadLog::tell(event));
    }
}
