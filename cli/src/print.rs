//! Standard output, for people and for programs.

use std::io::Write;

use anyhow::Context;
use serde::Serialize;

/// One JSON value on a line of its own.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string(value)?;
    line(&text)
}

/// One line.
pub fn line(text: &str) -> anyhow::Result<()> {
    piece(text)?;
    piece("\n")
}

/// Text without an end of line, at once.
pub fn piece(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output is closed")
}
