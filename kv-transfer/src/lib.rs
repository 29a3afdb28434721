//! The handoff of a prompt's KV from a prefill node to a decode node, as `docs/protocol.md`
//! says.

#![forbid(unsafe_code)]

mod codec;
mod coverage;
pub mod digest;
mod error;
pub mod frame;
pub mod grant;
#[cfg(test)]
mod lossy_link;
pub mod message;
pub mod receiver;
pub mod sender;
mod split;
pub mod timing;

pub use codec::DecodeError;
pub use error::TransferError;
pub use split::KvSpan;
