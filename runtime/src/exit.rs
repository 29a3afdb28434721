//! How a process ends: with 0, or with 1 and the reason on standard error.

use std::error::Error;
use std::process::ExitCode;

/// Says why a process failed, whatever the environment says about backtraces.
pub fn code(result: Result<(), impl AsRef<dyn Error + Send + Sync>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {}", in_full(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// The message, and each cause that it does not tell already.
fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Outer {
        #[error("outside: {0}")]
        Tells(#[source] std::io::Error),
        #[error("outside")]
        Hides(#[source] std::io::Error),
    }

    #[test]
    fn no_cause_is_told_twice() {
        let inner = || std::io::Error::other("inside");
        assert_eq!(in_full(&Outer::Tells(inner())), "outside: inside");
        assert_eq!(in_full(&Outer::Hides(inner())), "outside: inside");
    }
}
