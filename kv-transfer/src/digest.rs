//! One number over all frames of a transfer, whatever their order.

use crate::frame::FrameHeader;

/// Proves that both ends mean the same set of frames.
///
/// Definition: the sum modulo 2^128, over all distinct frames, of the first 16 bytes
/// (little-endian) of BLAKE3 over the frame's 44-byte header. The header holds place, length and
/// CRC-32C of the payload, so a frame that is missing, foreign or different changes the sum, and
/// order and repetition (each key counts once) do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameDigest {
    sum: u128,
    frames: u32,
}

impl FrameDigest {
    /// Adds a frame that was not added before.
    pub(crate) fn add(&mut self, header: &FrameHeader) {
        let hash = blake3::hash(&header.to_bytes());
        let low = hash.as_bytes()[..16].try_into().expect("a hash has 32 bytes");
        self.sum = self.sum.wrapping_add(u128::from_le_bytes(low));
        self.frames += 1;
    }

    pub fn frames(&self) -> u32 {
        self.frames
    }

    pub fn to_bytes(&self) -> [u8; 16] {
        self.sum.to_le_bytes()
    }
}
