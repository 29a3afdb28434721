//! Identifiers. Each is a type of its own, so that no two can be confused in a call.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::KvDtype;

/// Index of a token in the model's vocabulary.
pub type TokenId = u32;

macro_rules! integer_id {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize,
            Deserialize,
        )]
        pub struct $name(pub $int);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

integer_id!(
    /// A node's random number of this start; a restarted node carries another.
    Incarnation(u64)
);
integer_id!(
    /// Counts the attempts of one transfer; a frame of an older one is refused.
    Epoch(u32)
);
integer_id!(
    /// A page of the KV pool, `0..capacity`.
    BlockId(u32)
);

impl BlockId {
    /// In a list of pages: none is held for these positions, since their sequence never reads
    /// them again.
    pub const NONE: BlockId = BlockId(u32::MAX);
}

macro_rules! bytes_id {
    ($(#[$doc:meta])* $name:ident, $len:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub [u8; $len]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl TryFrom<&[u8]> for $name {
            type Error = std::array::TryFromSliceError;

            fn try_from(bytes: &[u8]) -> Result<Self, Self::Error> {
                bytes.try_into().map(Self)
            }
        }
    };
}

bytes_id!(
    /// Names one request across all nodes; random, drawn by the router.
    RequestId, 16
);
bytes_id!(
    /// Names one handoff; drawn by the decode node that granted it.
    TransferId, 16
);
bytes_id!(
    /// Chained, keyed hash of a prefix that ends at a block's border.
    BlockHash, 32
);
bytes_id!(
    /// Hash over weights, tokenizer and architecture; equal on nodes that may be paired.
    ModelFingerprint, 32
);

const NODE_ID_MAX_BYTES: usize = 253;

/// A node's name, unique in its cluster and stable over restarts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(Arc<str>);

impl NodeId {
    pub fn new(name: impl AsRef<str>) -> Self {
        Self(name.as_ref().into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a name can be given: it stands in keys of etcd, in labels and in logs.
    ///
    /// # Errors
    /// What it may be.
    pub fn check(name: &str) -> Result<(), String> {
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.:@[]".contains(letter);
        if name.len() <= NODE_ID_MAX_BYTES && name.chars().all(is_plain) {
            return Ok(());
        }
        Err(format!(
            "{name:?} cannot be a node's name; give at most {NODE_ID_MAX_BYTES} letters, digits, \
             and -_.:@[]"
        ))
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Between the arithmetic and the precision of KV.
const KV_SEPARATOR: &str = "/kv-";

/// Names one arithmetic: kernels' order of operations and the KV precision, e.g.
/// `x86-int8.1/kv-bf16`. Nodes that differ never serve one request together, unless KV is
/// converted between them (see [`may_pair`](Self::may_pair)).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NumericsVersion(pub String);

impl NumericsVersion {
    /// The version of `arithmetic` over KV of that precision.
    pub fn new(arithmetic: &str, kv: KvDtype) -> Self {
        Self(format!("{arithmetic}{KV_SEPARATOR}{kv}"))
    }

    /// The precision of KV that it names; none where another program made the name.
    pub fn kv_dtype(&self) -> Option<KvDtype> {
        Some(self.split()?.1)
    }

    /// Whether both name one arithmetic, over KV of two precisions.
    pub fn differs_in_kv_alone(&self, other: &Self) -> bool {
        match (self.split(), other.split()) {
            (Some((own, own_kv)), Some((others, others_kv))) => {
                own == others && own_kv != others_kv
            }
            _ => false,
        }
    }

    /// Whether a node of this version may prefill for one of the other: equals may; where KV is
    /// converted on its way, so may those that differ in its precision alone.
    pub fn may_pair(&self, other: &Self, kv_conversion: bool) -> bool {
        self == other || kv_conversion && self.differs_in_kv_alone(other)
    }

    fn split(&self) -> Option<(&str, KvDtype)> {
        let (arithmetic, kv) = self.0.rsplit_once(KV_SEPARATOR)?;
        Some((arithmetic, kv.parse().ok()?))
    }
}

impl fmt::Display for NumericsVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_pair_where_they_are_equal_or_kv_is_converted() {
        let version = |arithmetic, kv| NumericsVersion::new(arithmetic, kv);
        let bf16 = version("a.1", KvDtype::Bf16);
        let int8 = version("a.1", KvDtype::Int8);
        assert!(bf16.may_pair(&bf16, false) && bf16.may_pair(&bf16, true));
        assert!(!bf16.may_pair(&int8, false) && bf16.may_pair(&int8, true));
        assert!(bf16.differs_in_kv_alone(&int8) && int8.differs_in_kv_alone(&bf16));
        assert!(!bf16.differs_in_kv_alone(&bf16));
        let foreign =
            ["a.1", "a.1/kv-int2", "a.1/kv-", ""].map(|name| NumericsVersion(name.into()));
        let other_arithmetic = version("a.2", KvDtype::Int8);
        for other in foreign.iter().chain([&other_arithmetic]) {
            assert!(!bf16.may_pair(other, true) && !other.may_pair(&bf16, true), "{other}");
        }
        // Equal is equal, whoever made the name.
        assert!(foreign[0].may_pair(&foreign[0], false));
    }
}
