//! The router: takes requests over HTTP and gRPC, turns text into ids, plans where each runs, and
//! is the only sequencer of its tokens.
//!
//! Read it as a request goes: `openai` or `grpc`, `gateway`, `admit`, `dispatch` (with `plan` and
//! `cluster`), `answer`. It never computes, and knows no model file.

#![forbid(unsafe_code)]

mod admit;
mod answer;
mod app;
mod catalog;
mod cluster;
mod config;
mod dispatch;
mod gateway;
mod grpc;
mod metrics;
mod openai;
mod plan;
mod retry;

pub use app::{RouterApp, RouterError};
pub use config::{RouterConfig, StaticNode};
