//! A decode node: reserves blocks, takes KV in, verifies and places it, and generates tokens.
//!
//! It owns reservations, grants and the destination blocks. Which requests come is the router's
//! business; what a block holds is the engine's.

#![forbid(unsafe_code)]

mod app;
mod cancelled;
mod placer;
mod service;
mod sessions;

pub use app::DecodeNode;
