//! The harness of the end-to-end tests: real processes with real etcd on loopback, or the same
//! roles inside the test's own process; load with answers to compare; and what must hold after
//! every test.
//!
//! It owns processes, ports, waiting and comparing. What is tested stands in `tests/e2e/`, one
//! file for each promise. The model is SmolLM2-135M-Instruct, or `BATON_TEST_MODEL`.

#![forbid(unsafe_code)]

pub mod ask;
pub mod cluster;
pub mod cut;
pub mod etcd;
pub mod http;
pub mod load;
pub mod local;
pub mod metrics;
pub mod paths;
pub mod ports;
pub mod process;
pub mod prompts;
pub mod wait;

use tokio::sync::{Mutex, MutexGuard};

static ALONE: Mutex<()> = Mutex::const_new(());

/// Tests of one binary run side by side; those that start engines run one after the other, so
/// that each has the machine.
pub async fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().await
}
