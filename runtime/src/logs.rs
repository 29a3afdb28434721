//! Structured logs on standard error. Prompts and answers are never logged.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Starts logging: level from `BATON_LOG` (default `info`), `BATON_LOG_FORMAT=json` for machines.
/// A second call in one process changes nothing.
pub fn init() {
    init_at("info");
}

/// As [`init`], with another default level.
pub fn init_at(level: &str) {
    let filter = EnvFilter::try_from_env("BATON_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(has_colours())
        .with_target(false)
        .with_span_events(FmtSpan::NONE);
    let json = std::env::var("BATON_LOG_FORMAT").is_ok_and(|format| format == "json");
    // An error says that a subscriber is there already: that of a test, or of `baton up`.
    let _already = if json { builder.json().try_init() } else { builder.try_init() };
}

/// A file or a pipe gets none, nor who sets `NO_COLOR`.
fn has_colours() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|it| it.is_empty())
}
