//! Free ports for processes that must be told theirs, and get the same after a restart.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the range from which the system gives ports to outgoing connections: none of those can
/// take a port between this look and the process's own.
const FIRST: u32 = 10_000;
const COUNT: u32 = 20_000;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A port of loopback that nobody listens on.
///
/// # Panics
/// Where there is none.
pub fn free() -> u16 {
    // Test binaries may run side by side; each begins somewhere else.
    let offset = std::process::id().wrapping_mul(211);
    for _ in 0..COUNT {
        let at = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(offset) % COUNT;
        let port = u16::try_from(FIRST + at).expect("all of the range are ports");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port between {FIRST} and {} is free", FIRST + COUNT);
}
