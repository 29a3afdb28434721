//! Waiting for a state, with a deadline: never for a time.

use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Asks until `look` gives something.
///
/// # Panics
/// Where that takes longer than `within`; `what` and the last refusal say what was missing.
pub async fn until<T, F>(within: Duration, what: &str, mut look: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    let give_up = Instant::now() + within;
    let mut missing = "nobody answered".to_string();
    loop {
        match tokio::time::timeout_at(give_up.into(), look()).await {
            Ok(Ok(found)) => return found,
            Ok(Err(still)) => missing = still,
            // What was missing before the last look counts.
            Err(_) => {}
        }
        assert!(Instant::now() < give_up, "{what} not within {within:?}: {missing}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// # Panics
/// Where the future takes longer than `within`.
pub async fn in_time<T>(within: Duration, what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(within, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} took longer than {within:?}"),
    }
}
