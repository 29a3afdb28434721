//! Which KV block belongs to whom: the pool of blocks with reference counts and pins, copy on
//! write, the prefix index over chained block hashes, and what is evicted first.
//!
//! It owns block numbers and their meaning. It does not hold KV data, computes nothing, does no
//! I/O and knows no threads: a pool has one owner, the engine's thread.
//!
//! Blocks come and go through [`BlockPool`]; a sequence keeps its own in a [`BlockTable`];
//! [`prefix_hashes`] names prefixes so that any node, and the router, can look them up.

#![forbid(unsafe_code)]

mod error;
mod events;
mod hash;
mod pool;
mod table;

pub use error::OutOfBlocks;
pub use events::{BlockEvent, EVENTS_MAX};
pub use hash::{HashKey, prefix_hashes};
pub use pool::{ATTENTION_PARITY_TOKENS, BlockPool, Inserted, PoolStats};
pub use table::{BlockTable, CopyBlock};
