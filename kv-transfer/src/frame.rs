//! The canonical frame: K and V of one layer, one span of tokens, one span of KV heads.

use baton_types::{Epoch, KvDtype, KvLayout, TransferId};
use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::checksum::{crc32c, crc32c_of};
use crate::memory::{FrameBuffer, FrameMemory};

#[cfg(test)]
mod tests;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 44;
/// Most payload bytes of one frame.
pub const PAYLOAD_MAX_BYTES: usize = 1 << 20;
/// Canonical order, K then V: the one kind there is so far.
pub const KIND_CANONICAL: u8 = 0;

const CRC_AT: usize = 40;
/// The byte before the header when a frame travels as a message.
pub(crate) const TAG_FRAME: u8 = 1;

/// What is wrong with a frame, whoever sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("{got} bytes are no frame: its header takes {HEADER_BYTES}")]
    Short { got: usize },
    #[error("payload_len says {header} bytes, but {got} follow the header")]
    PayloadLen { header: u32, got: usize },
    #[error("payload_len is {0}; at most {PAYLOAD_MAX_BYTES} are allowed")]
    PayloadTooLong(u32),
    #[error("dtype {0} is unknown")]
    Dtype(u8),
    #[error("kind {0} is unknown")]
    Kind(u8),
    #[error("{0} is zero")]
    Empty(&'static str),
    #[error("{0} reaches beyond its type")]
    Overflow(&'static str),
}

/// The shape of KV as it travels: a node's layout without its block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireLayout {
    pub layers: u16,
    pub kv_heads: u16,
    pub head_dim: u16,
    pub dtype: KvDtype,
}

impl WireLayout {
    /// Bytes of K and V together of one token and one head in one layer.
    pub fn head_token_bytes(&self) -> usize {
        2 * self.half_bytes()
    }

    /// Bytes of K and V together of one token over all heads in one layer.
    pub fn token_layer_bytes(&self) -> usize {
        self.head_token_bytes() * usize::from(self.kv_heads)
    }

    /// Bytes of K alone of one token and one head, its scale included.
    pub(crate) fn half_bytes(&self) -> usize {
        self.dtype.vector_bytes(usize::from(self.head_dim))
    }

    /// What a payload is made of, in order: elements of K, of V, scales of K, of V. Each part is
    /// `[head][token]`, of so many bytes for a token; 0 where the dtype has no scales.
    pub(crate) fn part_bytes(&self) -> [usize; 4] {
        let elements = self.dtype.elements_bytes(usize::from(self.head_dim));
        let scale = self.dtype.scale_bytes();
        [elements, elements, scale, scale]
    }
}

impl From<&KvLayout> for WireLayout {
    fn from(layout: &KvLayout) -> Self {
        let &KvLayout { layers, kv_heads, head_dim, dtype, .. } = layout;
        Self { layers, kv_heads, head_dim, dtype }
    }
}

/// Which part of a prompt's KV a frame holds; with transfer and epoch its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameKey {
    pub layer: u16,
    pub token_first: u32,
    pub token_count: u32,
    pub head_first: u16,
    pub head_count: u16,
}

impl FrameKey {
    pub fn tokens(&self) -> std::ops::Range<usize> {
        let first = self.token_first as usize;
        first..first + self.token_count as usize
    }

    /// Whether both hold KV of one (layer, head, token).
    pub fn intersects(&self, other: &FrameKey) -> bool {
        fn overlap(a: u32, a_count: u32, b: u32, b_count: u32) -> bool {
            u64::from(a) < u64::from(b) + u64::from(b_count)
                && u64::from(b) < u64::from(a) + u64::from(a_count)
        }
        self.layer == other.layer
            && overlap(self.token_first, self.token_count, other.token_first, other.token_count)
            && overlap(
                self.head_first.into(),
                self.head_count.into(),
                other.head_first.into(),
                other.head_count.into(),
            )
    }

    /// `[K[heads, tokens, dim], V[heads, tokens, dim]]` in bytes, then their scales, if any.
    pub fn payload_bytes(&self, layout: &WireLayout) -> usize {
        self.head_count as usize * self.token_count as usize * layout.head_token_bytes()
    }

    pub(crate) fn put(&self, out: &mut BytesMut) {
        out.put_u16_le(self.layer);
        out.put_u16_le(self.head_first);
        out.put_u16_le(self.head_count);
        out.put_u32_le(self.token_first);
        out.put_u32_le(self.token_count);
    }

    /// Reads what `put` wrote; the caller has checked that the bytes are there.
    pub(crate) fn get(bytes: &mut impl Buf) -> Self {
        let layer = bytes.get_u16_le();
        let head_first = bytes.get_u16_le();
        let head_count = bytes.get_u16_le();
        let token_first = bytes.get_u32_le();
        let token_count = bytes.get_u32_le();
        Self { layer, token_first, token_count, head_first, head_count }
    }
}

impl std::fmt::Display for FrameKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layer, token_first, token_count, head_first, head_count } = self;
        write!(
            f,
            "layer {layer}, tokens {token_first}+{token_count}, heads {head_first}+{head_count}"
        )
    }
}

/// A frame's header, little-endian on the wire, in this order: transfer_id 16 B, epoch u32,
/// layer u16, head_first u16, head_count u16, token_first u32, token_count u32, dtype u8,
/// kind u8, payload_len u32, crc32c u32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub transfer_id: TransferId,
    pub epoch: Epoch,
    pub key: FrameKey,
    pub dtype: KvDtype,
    pub kind: u8,
    pub payload_len: u32,
    /// CRC-32C over the header with this field zero, then the payload.
    pub crc32c: u32,
}

impl FrameHeader {
    fn put(&self, out: &mut BytesMut) {
        out.put_slice(&self.transfer_id.0);
        out.put_u32_le(self.epoch.0);
        self.key.put(out);
        out.put_u8(self.dtype.code());
        out.put_u8(self.kind);
        out.put_u32_le(self.payload_len);
        out.put_u32_le(self.crc32c);
    }

    /// The 44 bytes as they travel.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut out = BytesMut::with_capacity(HEADER_BYTES);
        self.put(&mut out);
        out.as_ref().try_into().expect("the fields add up to the header's size")
    }

    fn decode(mut bytes: &[u8]) -> Result<Self, FrameError> {
        if bytes.len() < HEADER_BYTES {
            return Err(FrameError::Short { got: bytes.len() });
        }
        let mut transfer_id = TransferId::default();
        bytes.copy_to_slice(&mut transfer_id.0);
        let epoch = Epoch(bytes.get_u32_le());
        let key = FrameKey::get(&mut bytes);
        let dtype = bytes.get_u8();
        let dtype = KvDtype::from_code(dtype).ok_or(FrameError::Dtype(dtype))?;
        let kind = bytes.get_u8();
        let (payload_len, crc32c) = (bytes.get_u32_le(), bytes.get_u32_le());
        if kind != KIND_CANONICAL {
            return Err(FrameError::Kind(kind));
        }
        if payload_len as usize > PAYLOAD_MAX_BYTES {
            return Err(FrameError::PayloadTooLong(payload_len));
        }
        for (field, count) in
            [("head_count", u32::from(key.head_count)), ("token_count", key.token_count)]
        {
            if count == 0 {
                return Err(FrameError::Empty(field));
            }
        }
        key.token_first.checked_add(key.token_count).ok_or(FrameError::Overflow("token_count"))?;
        key.head_first.checked_add(key.head_count).ok_or(FrameError::Overflow("head_count"))?;
        Ok(Self { transfer_id, epoch, key, dtype, kind, payload_len, crc32c })
    }
}

/// A header and its payload. Cloning copies no payload.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    header: FrameHeader,
    /// `TAG_FRAME`, header, payload: a frame is laid out once, as the message that it travels in.
    message: Bytes,
}

impl Frame {
    /// Lays a frame out: `fill` appends its payload, once.
    ///
    /// # Panics
    /// Where `fill` does not append exactly `header.payload_len` bytes.
    pub(crate) fn build(
        mut header: FrameHeader,
        memory: &FrameMemory,
        fill: impl FnOnce(&mut FrameBuffer),
    ) -> Self {
        let payload_at = 1 + HEADER_BYTES;
        let mut message = memory.take(payload_at + header.payload_len as usize);
        message.put_slice(&[TAG_FRAME]);
        header.crc32c = 0;
        message.put_slice(&header.to_bytes());
        fill(&mut message);
        assert_eq!(message.len() - payload_at, header.payload_len as usize, "payload_len");
        header.crc32c = crc32c(&message.written()[1..]);
        let crc = header.crc32c.to_le_bytes();
        message.written()[1 + CRC_AT..payload_at].copy_from_slice(&crc);
        Self { header, message: message.freeze() }
    }

    /// Reads a frame that follows its tag byte; the payload is not copied, and the checksum is
    /// not looked at: see [`is_intact`](Self::is_intact).
    ///
    /// # Errors
    /// The first field that is out of bounds.
    pub(crate) fn decode_message(message: Bytes) -> Result<Self, FrameError> {
        let header = FrameHeader::decode(&message[1..])?;
        let got = message.len() - 1 - HEADER_BYTES;
        if header.payload_len as usize != got {
            return Err(FrameError::PayloadLen { header: header.payload_len, got });
        }
        Ok(Self { header, message })
    }

    pub fn header(&self) -> &FrameHeader {
        &self.header
    }

    pub fn key(&self) -> FrameKey {
        self.header.key
    }

    /// K, then V, each `[head][token][head_dim]`, then the scales of K and of V, each
    /// `[head][token]`, where the dtype has them; little-endian.
    pub fn payload(&self) -> &[u8] {
        &self.message[1 + HEADER_BYTES..]
    }

    /// Whether the checksum fits.
    pub fn is_intact(&self) -> bool {
        let header = &self.message[1..1 + CRC_AT];
        crc32c_of(&[header, &[0; 4], self.payload()]) == self.header.crc32c
    }

    pub(crate) fn as_message(&self) -> &Bytes {
        &self.message
    }
}

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.header.fmt(f)
    }
}
