//! The shape of a KV cache, as far as two nodes must agree about it.

use serde::{Deserialize, Serialize};

/// Prefix hashes are chained over units of so many tokens, whatever a node's block size; a block
/// size is a multiple of it, so that a router hashes a prompt once for all nodes.
pub const HASH_UNIT_TOKENS: usize = 16;

/// How one element of K or V is stored, or travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    F16,
    Bf16,
}

impl KvDtype {
    pub fn size_bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
        }
    }

    /// The number that stands for it in a frame header.
    pub fn code(self) -> u8 {
        match self {
            KvDtype::F32 => 0,
            KvDtype::F16 => 1,
            KvDtype::Bf16 => 2,
        }
    }

    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(KvDtype::F32),
            1 => Some(KvDtype::F16),
            2 => Some(KvDtype::Bf16),
            _ => None,
        }
    }
}

/// Shape of one node's KV cache: `[layers][blocks][kv_heads][block_tokens][head_dim]`, K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    pub layers: u16,
    pub kv_heads: u16,
    pub head_dim: u16,
    pub block_tokens: u16,
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Bytes of K and V together that one token takes in one layer.
    pub fn token_layer_bytes(&self) -> usize {
        2 * self.kv_heads as usize * self.head_dim as usize * self.dtype.size_bytes()
    }

    /// Bytes of K and V together that one block takes over all layers.
    pub fn block_bytes(&self) -> usize {
        self.token_layer_bytes() * self.layers as usize * self.block_tokens as usize
    }

    /// Blocks that `tokens` tokens take.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens as usize)
    }
}
