//! A tokio runtime on one thread of its own, for work that must neither wait behind other tasks
//! nor move between threads, such as streams of KV.

use std::io;
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// Dropping it ends its thread, drops what still runs there, and waits for that.
#[derive(Debug)]
pub struct OwnRuntime {
    handle: Handle,
    ended: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl OwnRuntime {
    /// # Errors
    /// Where the system gives no thread.
    pub fn start(name: &str) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let ended = CancellationToken::new();
        let waits = ended.clone();
        let run = move || {
            runtime.block_on(waits.cancelled());
            runtime.shutdown_background();
        };
        let thread = Some(std::thread::Builder::new().name(name.to_owned()).spawn(run)?);
        Ok(Self { handle, ended, thread })
    }

    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        self.ended.cancel();
        let others =
            self.thread.take().filter(|own| own.thread().id() != std::thread::current().id());
        if let Some(Err(_)) = others.map(JoinHandle::join) {
            tracing::error!("a runtime's thread has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tasks_run_on_its_thread_until_it_is_dropped() {
        let own = OwnRuntime::start("own-test").unwrap();
        let name = || std::thread::current().name().map(str::to_owned);
        let ran = own.handle().spawn(async move { name() }).await.unwrap();
        assert_eq!(ran.as_deref(), Some("own-test"));
        let endless = own.handle().spawn(std::future::pending::<()>());
        drop(own);
        // The thread is gone already, and the task with it.
        assert!(endless.is_finished());
        assert!(endless.await.unwrap_err().is_cancelled());
    }
}
