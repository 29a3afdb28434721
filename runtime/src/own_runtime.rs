//! A tokio runtime on one thread of its own, for work that must neither wait behind other tasks
//! nor move between threads, such as streams of KV.

use std::io;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Its thread ends, and drops what still runs there, when this is dropped.
#[derive(Debug)]
pub struct OwnRuntime {
    handle: Handle,
    _ends: DropGuard,
}

impl OwnRuntime {
    /// # Errors
    /// Where the system gives no thread.
    pub fn start(name: &str) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let ended = CancellationToken::new();
        let waits = ended.clone();
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || runtime.block_on(waits.cancelled()))?;
        Ok(Self { handle, _ends: ended.drop_guard() })
    }

    pub fn handle(&self) -> &Handle {
        &self.handle
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
        assert!(endless.await.unwrap_err().is_cancelled());
    }
}
