//! Names for prefixes: chained, keyed hashes over units of [`HASH_UNIT_TOKENS`] tokens.
//!
//! The unit is the same on every node, whatever its block size: a node with blocks of 32 tokens
//! uses each second hash. So the router hashes a prompt once for all nodes.

use baton_types::{
    BlockHash, HASH_UNIT_TOKENS, KvDtype, ModelFingerprint, NumericsVersion, TokenId,
};

/// Names this use of BLAKE3; a change of what is hashed changes it.
const KEY_CONTEXT: &str = "baton 2026 kv prefix hash v1";

/// The key of one model, one arithmetic and one tenant: blocks hashed under another key never
/// match, so KV of another precision or another tenant is never served.
#[derive(Clone)]
pub struct HashKey([u8; 32]);

impl HashKey {
    /// Derives the key (BLAKE3's `derive_key`) from everything that a block's content depends
    /// on besides its tokens.
    pub fn new(
        model: &ModelFingerprint,
        numerics: &NumericsVersion,
        kv_dtype: KvDtype,
        tenant_salt: &[u8],
    ) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(KEY_CONTEXT);
        for field in [&model.0[..], numerics.0.as_bytes(), &[kv_dtype.code()], tenant_salt] {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        Self(*hasher.finalize().as_bytes())
    }
}

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashKey(..)")
    }
}

/// `hashes[units] = chain(tokens[units * 16 ..])`: hash `i` stands for the prefix of
/// `(i + 1) * HASH_UNIT_TOKENS` tokens. An incomplete unit at the end has none.
///
/// Each is keyed BLAKE3 over the hash before it (zeros for the first) and the unit's tokens as
/// little-endian u32.
pub fn prefix_hashes(key: &HashKey, tokens: &[TokenId]) -> Vec<BlockHash> {
    let mut parent = BlockHash::default();
    let units = tokens.chunks_exact(HASH_UNIT_TOKENS);
    units
        .map(|unit| {
            let mut bytes = [0_u8; 32 + 4 * HASH_UNIT_TOKENS];
            bytes[..32].copy_from_slice(&parent.0);
            for (slot, token) in bytes[32..].chunks_exact_mut(4).zip(unit) {
                slot.copy_from_slice(&token.to_le_bytes());
            }
            parent = BlockHash(*blake3::keyed_hash(&key.0, &bytes).as_bytes());
            parent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(numerics: &str, dtype: KvDtype, salt: &[u8]) -> HashKey {
        HashKey::new(&ModelFingerprint([7; 32]), &NumericsVersion(numerics.into()), dtype, salt)
    }

    #[test]
    fn a_longer_prompt_begins_with_the_hashes_of_the_shorter() {
        let key = key("n1", KvDtype::Bf16, b"");
        let tokens: Vec<TokenId> = (0..100).collect();
        let all = prefix_hashes(&key, &tokens);
        assert_eq!(all.len(), 6);
        for length in 0..tokens.len() {
            let some = prefix_hashes(&key, &tokens[..length]);
            assert_eq!(some, all[..length / HASH_UNIT_TOKENS]);
        }
    }

    #[test]
    fn one_token_changes_every_later_hash() {
        let key = key("n1", KvDtype::Bf16, b"");
        let tokens: Vec<TokenId> = (0..96).collect();
        let all = prefix_hashes(&key, &tokens);
        let mut changed = tokens.clone();
        changed[20] = 999;
        let other = prefix_hashes(&key, &changed);
        assert_eq!(all[0], other[0]);
        assert!(all[1..].iter().zip(&other[1..]).all(|(a, b)| a != b));
    }

    #[test]
    fn every_field_of_the_key_separates() {
        let tokens: Vec<TokenId> = (0..16).collect();
        let hashes: Vec<_> = [
            key("n1", KvDtype::Bf16, b""),
            key("n2", KvDtype::Bf16, b""),
            key("n1", KvDtype::F16, b""),
            key("n1", KvDtype::Bf16, b"tenant"),
        ]
        .iter()
        .map(|key| prefix_hashes(key, &tokens)[0])
        .collect();
        for (i, a) in hashes.iter().enumerate() {
            assert!(hashes[i + 1..].iter().all(|b| a != b));
        }
    }
}
