//! A prefill node: computes prompts and streams their KV, layer by layer, to decode nodes.
//!
//! It owns the source blocks until a transfer ends, and the first token of each choice.

#![forbid(unsafe_code)]

mod app;
mod convert;
mod job;
mod metrics;
mod pull;
mod service;

pub use app::PrefillNode;
