//! Signals, and the two stages of an end: drain, then stop.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Tells all parts of a process how far its end has come.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// No new work; what runs goes on.
    pub drain: CancellationToken,
    /// Everything ends now.
    pub stop: CancellationToken,
}

impl Shutdown {
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for SIGTERM or SIGINT and begins to drain; a second signal, or `grace` later, stops.
    ///
    /// # Errors
    /// Where the system refuses a signal handler.
    pub fn on_signals(&self, grace: Duration) -> std::io::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let shutdown = self.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => tracing::info!("SIGTERM: draining"),
                _ = interrupt.recv() => tracing::info!("SIGINT: draining"),
                () = shutdown.drain.cancelled() => {}
            }
            shutdown.drain.cancel();
            tokio::select! {
                _ = terminate.recv() => tracing::warn!("second signal: stopping at once"),
                _ = interrupt.recv() => tracing::warn!("second signal: stopping at once"),
                () = tokio::time::sleep(grace) => tracing::warn!("the grace period is over"),
                () = shutdown.stop.cancelled() => {}
            }
            shutdown.stop.cancel();
        });
        Ok(())
    }
}
