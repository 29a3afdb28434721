//! The permit to write into reserved blocks. Only the node that minted it makes and checks the
//! MAC, so no key travels; everybody else carries the bytes as they are.

use std::ops::Range;

use baton_types::{
    Epoch, Incarnation, KvDtype, ModelFingerprint, NodeId, NumericsVersion, RequestId, TransferId,
};
use bytes::{BufMut, Bytes, BytesMut};

use crate::TransferError;
use crate::codec::{DecodeError, Reader, put_bytes};
use crate::frame::WireLayout;

#[cfg(test)]
mod tests;

/// Most bytes of an encoded grant.
pub const GRANT_MAX_BYTES: usize = 4096;
pub(crate) const NAME_MAX_BYTES: usize = 512;

const GRANT_VERSION: u8 = 2;
const MAC_BYTES: usize = 32;

/// What a decode node allows one prefill node to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub transfer_id: TransferId,
    pub request_id: RequestId,
    /// Begins at 1; +1 at each retry.
    pub epoch: Epoch,
    pub receiver: NodeId,
    pub receiver_incarnation: Incarnation,
    /// The one start of the one prefill node that may use it.
    pub sender_incarnation: Incarnation,
    /// Length of the prompt.
    pub tokens: u32,
    /// Leading tokens whose KV the receiver holds: they do not travel.
    pub cached_tokens: u32,
    /// Tokens that no answer sees: their KV does not travel either. Empty where all are seen.
    pub unseen: Range<u32>,
    /// How KV shall travel.
    pub layout: WireLayout,
    pub fingerprint: ModelFingerprint,
    pub numerics: NumericsVersion,
    /// Answers (`n`), each of which needs a first token in the commit.
    pub choices: u16,
    /// Time after minting within which it must be opened.
    pub expiry_ms: u64,
}

/// Why a grant is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    #[error("the grant cannot be read: {0}")]
    Decode(#[from] DecodeError),
    #[error("the grant's MAC does not fit: this start of this node has not minted it")]
    Mac,
    #[error("the grant expired {late_ms} ms ago")]
    Expired { late_ms: u64 },
}

/// Makes and checks grants with a secret of this start.
pub struct GrantMinter {
    secret: [u8; 32],
}

impl GrantMinter {
    /// `secret` is drawn at random when the node starts, and never stored.
    pub fn new(secret: [u8; 32]) -> Self {
        Self { secret }
    }

    /// The grant's opaque bytes; `now_ms` is the minter's monotonic clock.
    pub fn mint(&self, grant: &Grant, now_ms: u64) -> Bytes {
        let mut out = BytesMut::new();
        grant.put(now_ms.saturating_add(grant.expiry_ms), &mut out);
        let mac = blake3::keyed_hash(&self.secret, &out);
        out.put_slice(mac.as_bytes());
        out.freeze()
    }

    /// Checks MAC (in constant time), then expiry, by the clock that `mint` was given.
    ///
    /// # Errors
    /// Each variant of [`GrantError`].
    pub fn verify(&self, bytes: &Bytes, now_ms: u64) -> Result<Grant, GrantError> {
        let (body, mac) = split_mac(bytes)?;
        let expected = blake3::keyed_hash(&self.secret, &body);
        // `blake3::Hash` compares in constant time.
        if expected != blake3::Hash::from_bytes(mac) {
            return Err(GrantError::Mac);
        }
        let (grant, expires_at_ms) = Grant::get(body)?;
        match now_ms.checked_sub(expires_at_ms) {
            Some(late_ms) if late_ms > 0 => Err(GrantError::Expired { late_ms }),
            _ => Ok(grant),
        }
    }
}

impl std::fmt::Debug for GrantMinter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GrantMinter(..)")
    }
}

impl Grant {
    /// Reads a grant without its secret: what a sender, to whom it was given over an
    /// authenticated channel, needs to know.
    ///
    /// # Errors
    /// Where the bytes are no grant.
    pub fn read(bytes: &Bytes) -> Result<Self, GrantError> {
        let (body, _) = split_mac(bytes)?;
        Ok(Self::get(body)?.0)
    }

    fn put(&self, expires_at_ms: u64, out: &mut BytesMut) {
        out.put_u8(GRANT_VERSION);
        out.put_slice(&self.transfer_id.0);
        out.put_slice(&self.request_id.0);
        out.put_u32_le(self.epoch.0);
        put_bytes(out, self.receiver.as_str().as_bytes());
        out.put_u64_le(self.receiver_incarnation.0);
        out.put_u64_le(self.sender_incarnation.0);
        out.put_u32_le(self.tokens);
        out.put_u32_le(self.cached_tokens);
        out.put_u32_le(self.unseen.start);
        out.put_u32_le(self.unseen.end);
        put_layout(out, &self.layout);
        out.put_slice(&self.fingerprint.0);
        put_bytes(out, self.numerics.0.as_bytes());
        out.put_u16_le(self.choices);
        out.put_u64_le(self.expiry_ms);
        out.put_u64_le(expires_at_ms);
    }

    fn get(body: Bytes) -> Result<(Self, u64), DecodeError> {
        let mut reader = Reader::new(body);
        let version = reader.u8("grant version")?;
        if version != GRANT_VERSION {
            return Err(DecodeError::Value { field: "grant version", value: version.into() });
        }
        let grant = Self {
            transfer_id: TransferId(reader.array("transfer_id")?),
            request_id: RequestId(reader.array("request_id")?),
            epoch: Epoch(reader.u32("epoch")?),
            receiver: NodeId::new(reader.string("receiver", NAME_MAX_BYTES)?),
            receiver_incarnation: Incarnation(reader.u64("receiver_incarnation")?),
            sender_incarnation: Incarnation(reader.u64("sender_incarnation")?),
            tokens: reader.u32("tokens")?,
            cached_tokens: reader.u32("cached_tokens")?,
            unseen: reader.u32("unseen")?..reader.u32("unseen")?,
            layout: get_layout(&mut reader)?,
            fingerprint: ModelFingerprint(reader.array("fingerprint")?),
            numerics: NumericsVersion(reader.string("numerics", NAME_MAX_BYTES)?),
            choices: reader.u16("choices")?,
            expiry_ms: reader.u64("expiry_ms")?,
        };
        let expires_at_ms = reader.u64("expires_at_ms")?;
        reader.finish()?;
        if grant.cached_tokens > grant.tokens {
            let value = grant.cached_tokens.into();
            return Err(DecodeError::Value { field: "cached_tokens", value });
        }
        if grant.unseen.start > grant.unseen.end || grant.unseen.end > grant.tokens {
            let value = grant.unseen.end.into();
            return Err(DecodeError::Value { field: "unseen", value });
        }
        Ok((grant, expires_at_ms))
    }
}

/// Whether a sender of these numerics may fill the grant's blocks.
///
/// # Errors
/// `KvPrecision` where it is the precision of KV alone that forbids it, else `Mismatch`.
pub(crate) fn check_numerics(
    granted: &NumericsVersion,
    sender: &NumericsVersion,
    kv_conversion: bool,
) -> Result<(), TransferError> {
    if sender.may_pair(granted, kv_conversion) {
        return Ok(());
    }
    if sender.differs_in_kv_alone(granted) {
        let (granted, sender) = (granted.clone(), sender.clone());
        return Err(TransferError::KvPrecision { granted, sender });
    }
    let (granted, peer) = (granted.to_string(), sender.to_string());
    Err(TransferError::Mismatch { what: "numerics", granted, peer })
}

pub(crate) fn put_layout(out: &mut BytesMut, layout: &WireLayout) {
    out.put_u16_le(layout.layers);
    out.put_u16_le(layout.kv_heads);
    out.put_u16_le(layout.head_dim);
    out.put_u8(layout.dtype.code());
}

pub(crate) fn get_layout(reader: &mut Reader) -> Result<WireLayout, DecodeError> {
    let mut dimension = |field| match reader.u16(field)? {
        0 => Err(DecodeError::Value { field, value: 0 }),
        some => Ok(some),
    };
    let layers = dimension("layers")?;
    let kv_heads = dimension("kv_heads")?;
    let head_dim = dimension("head_dim")?;
    let code = reader.u8("dtype")?;
    let dtype = KvDtype::from_code(code)
        .ok_or(DecodeError::Value { field: "dtype", value: code.into() })?;
    Ok(WireLayout { layers, kv_heads, head_dim, dtype })
}

fn split_mac(bytes: &Bytes) -> Result<(Bytes, [u8; MAC_BYTES]), DecodeError> {
    let len = bytes.len();
    if len > GRANT_MAX_BYTES {
        return Err(DecodeError::TooLong { field: "grant", len, max: GRANT_MAX_BYTES });
    }
    let body_len = len.checked_sub(MAC_BYTES).ok_or(DecodeError::Short("mac"))?;
    let mac = bytes[body_len..].try_into().map_err(|_| DecodeError::Short("mac"))?;
    Ok((bytes.slice(..body_len), mac))
}
