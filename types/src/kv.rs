//! The shape of a KV cache, as far as two nodes must agree about it.

use serde::{Deserialize, Serialize};

/// Prefix hashes are chained over units of so many tokens, whatever a node's block size; a block
/// size is a multiple of it, so that a router hashes a prompt once for all nodes.
pub const HASH_UNIT_TOKENS: usize = 16;

/// How K and V are stored, or travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    F16,
    #[default]
    Bf16,
    /// Signed bytes, with one f16 scale for each token and head, of K and of V.
    Int8,
    /// Four bits, with one f16 scale for each token and head, of K and of V: element `2 i` in the
    /// low half of byte `i`, plus 8.
    Int4,
}

impl KvDtype {
    pub const ALL: [KvDtype; 5] =
        [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Int8, KvDtype::Int4];

    /// Those in which a node holds its KV.
    pub const STORED: [KvDtype; 3] = [KvDtype::Bf16, KvDtype::Int8, KvDtype::Int4];

    /// Bits of one element.
    pub fn element_bits(self) -> usize {
        match self {
            KvDtype::F32 => 32,
            KvDtype::F16 | KvDtype::Bf16 => 16,
            KvDtype::Int8 => 8,
            KvDtype::Int4 => 4,
        }
    }

    /// Bytes of K's (or of V's) elements of one token and one head, without its scale. A head has a
    /// whole number of bytes.
    pub fn elements_bytes(self, head_dim: usize) -> usize {
        (head_dim * self.element_bits()).div_ceil(8)
    }

    /// Whether a node can hold its KV so.
    pub fn is_stored(self) -> bool {
        Self::STORED.contains(&self)
    }

    /// Bytes of the scale that the elements of one token and head share; 0 where there is none.
    pub fn scale_bytes(self) -> usize {
        match self {
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => 0,
            KvDtype::Int8 | KvDtype::Int4 => 2,
        }
    }

    /// Bytes of K (or of V) of one token and one head, its scale included.
    pub fn vector_bytes(self, head_dim: usize) -> usize {
        self.elements_bytes(head_dim) + self.scale_bytes()
    }

    /// The number that stands for it in a frame header.
    pub fn code(self) -> u8 {
        match self {
            KvDtype::F32 => 0,
            KvDtype::F16 => 1,
            KvDtype::Bf16 => 2,
            KvDtype::Int8 => 3,
            KvDtype::Int4 => 4,
        }
    }

    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }

    /// As configuration and numerics versions write it.
    pub fn as_str(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8 => "int8",
            KvDtype::Int4 => "int4",
        }
    }
}

impl std::fmt::Display for KvDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// No precision of KV has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no precision of KV: bf16, int8 and int4 are")]
pub struct UnknownKvDtype(String);

impl std::str::FromStr for KvDtype {
    type Err = UnknownKvDtype;

    fn from_str(name: &str) -> Result<Self, UnknownKvDtype> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.as_str() == name);
        found.ok_or_else(|| UnknownKvDtype(name.to_owned()))
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
    /// Bytes of K and V together that one token takes in one layer, scales included.
    pub fn token_layer_bytes(&self) -> usize {
        2 * self.kv_heads as usize * self.dtype.vector_bytes(self.head_dim as usize)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_include_the_scales() {
        let layout =
            |dtype| KvLayout { layers: 30, kv_heads: 3, head_dim: 64, block_tokens: 16, dtype };
        for (dtype, bytes) in KvDtype::ALL.into_iter().zip([1536, 768, 768, 396, 204]) {
            assert_eq!(layout(dtype).token_layer_bytes(), bytes, "{dtype}");
            assert_eq!(layout(dtype).block_bytes(), 30 * 16 * bytes, "{dtype}");
        }
    }

    #[test]
    fn codes_and_names_lead_back() {
        for (code, dtype) in KvDtype::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), code);
            assert_eq!(KvDtype::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.as_str().parse(), Ok(dtype));
        }
        assert_eq!(KvDtype::from_code(5), None);
        let error = "int2".parse::<KvDtype>().unwrap_err().to_string();
        assert_eq!(error, "\"int2\" is no precision of KV: bf16, int8 and int4 are");
    }
}
