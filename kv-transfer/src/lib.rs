//! The handoff of a prompt's KV from a prefill node to a decode node, as `docs/protocol.md`
//! says: grants, canonical frames under credit, checksums, fencing by epoch and incarnation, and
//! the commit after which decoding starts.
//!
//! It owns the protocol, its two state machines and its transports. It does not know where blocks
//! live: KV comes in as [`KvSpan`]s and goes out through a [`Placer`](receive::Placer).
//!
//! # The prefill node
//! [`Sender::open`](sender::Sender::open) with the grant's bytes, a stream from
//! [`Transport::connect`](transport::Transport::connect), and [`send::drive`] with a channel into
//! which the engine puts a span after each layer.
//!
//! # The decode node
//! [`Receiver::grant`](receiver::Receiver::grant) at `Reserve`; for each stream of
//! [`Incoming`](transport::Incoming) [`receive::read_open`], which names the transfer, then
//! [`receive::drive`] with that transfer's machine. For a retry: fence the running drive, wait
//! for it to return, then [`Receiver::regrant`](receiver::Receiver::regrant).

#![deny(unsafe_code)]

pub mod bench;
mod checksum;
pub mod clock;
mod codec;
mod coverage;
pub mod digest;
mod error;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod grant;
#[cfg(test)]
mod lossy_link;
pub mod memory;
pub mod message;
pub mod pace;
pub mod receive;
pub mod receiver;
pub mod send;
pub mod sender;
mod split;
pub mod timing;
pub mod transport;

pub use codec::DecodeError;
pub use error::TransferError;
pub use split::KvSpan;
