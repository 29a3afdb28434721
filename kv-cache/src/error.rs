//! The one way in which a pool says no.

/// The pool cannot give so many blocks; nothing was allocated and nothing was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} KV blocks are wanted, but only {free} are free or can be evicted")]
pub struct OutOfBlocks {
    pub wanted: usize,
    /// What an `alloc` could have had: free blocks and cached ones that nobody holds.
    pub free: usize,
}
