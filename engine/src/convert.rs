//! KV of one precision as another, on its way between nodes that differ in it.
//!
//! Numbers are rounded as a node that stores them rounds them, so KV that comes from f32 has the
//! bytes that such a node would hold. int4 is held rotated (see `kernels::hadamard`): it is rotated
//! back on its way out, and everything else on its way in.

use baton_types::KvDtype;

use crate::kernels::attention::format::{NIBBLE_OFFSET, StoredScale};
use crate::kernels::hadamard;
use crate::kernels::numerics::{bf16_round, bf16_widen, f16_round, f16_widen};

#[cfg(test)]
mod tests;

/// Between an element's number and the four bits that stand for it.
const NIBBLE_ZERO: f32 = NIBBLE_OFFSET as f32;

/// Payloads of one shape from one precision to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvConversion {
    from: KvDtype,
    to: KvDtype,
    heads: usize,
    head_dim: usize,
}

/// Why KV cannot be converted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvConversionError {
    #[error("heads of {head_dim} elements have no whole number of bytes in {dtype}")]
    HeadDim { head_dim: usize, dtype: KvDtype },
    #[error("{heads} heads of {head_dim} elements hold nothing")]
    Empty { heads: usize, head_dim: usize },
    #[error("{tokens} tokens of {dtype} take {want} bytes, but {got} are given")]
    PayloadSize { tokens: usize, dtype: KvDtype, got: usize, want: usize },
}

/// A canonical payload, cut: K's and V's elements, then their scales.
struct Cut<'a> {
    elements: &'a [u8],
    scales: &'a [u8],
}

impl KvConversion {
    /// # Errors
    /// `Empty`, and `HeadDim` for int4 of an odd number of elements.
    pub fn new(
        from: KvDtype,
        to: KvDtype,
        heads: u16,
        head_dim: u16,
    ) -> Result<Self, KvConversionError> {
        let (heads, head_dim) = (usize::from(heads), usize::from(head_dim));
        if heads == 0 || head_dim == 0 {
            return Err(KvConversionError::Empty { heads, head_dim });
        }
        for dtype in [from, to] {
            if !(head_dim * dtype.element_bits()).is_multiple_of(8) {
                return Err(KvConversionError::HeadDim { head_dim, dtype });
            }
        }
        Ok(Self { from, to, heads, head_dim })
    }

    pub fn from(&self) -> KvDtype {
        self.from
    }

    pub fn to(&self) -> KvDtype {
        self.to
    }

    /// Whether nothing is to be done.
    pub fn is_identity(&self) -> bool {
        self.from == self.to
    }

    /// Appends to `out` what `payload` holds: K, then V, each `[heads][token_count][head_dim]`,
    /// then the scales of K and of V, each `[heads][token_count]`, where a precision has them.
    ///
    /// # Errors
    /// `PayloadSize`, with nothing appended.
    pub fn convert(
        &self,
        payload: &[u8],
        token_count: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), KvConversionError> {
        // What does not fit in a usize fits no payload either.
        let vectors = (2 * self.heads).saturating_mul(token_count);
        let want = vectors.saturating_mul(self.from.vector_bytes(self.head_dim));
        if payload.len() != want {
            let (tokens, dtype, got) = (token_count, self.from, payload.len());
            return Err(KvConversionError::PayloadSize { tokens, dtype, got, want });
        }
        if self.is_identity() {
            out.extend_from_slice(payload);
            return Ok(());
        }
        let (row, scale) = (self.to.elements_bytes(self.head_dim), self.to.scale_bytes());
        let start = out.len();
        out.resize(start + vectors * (row + scale), 0);
        let (rows, scales) = out[start..].split_at_mut(vectors * row);
        let from_row = self.from.elements_bytes(self.head_dim);
        let (elements, from_scales) = payload.split_at(vectors * from_row);
        let cut = Cut { elements, scales: from_scales };
        let is_turned = (self.from == KvDtype::Int4) != (self.to == KvDtype::Int4);
        let mut numbers = vec![0.0; self.head_dim];
        for (at, row) in rows.chunks_exact_mut(row).enumerate() {
            cut.read(self.from, at, &mut numbers);
            if is_turned {
                hadamard::rotate(&mut numbers);
            }
            write(self.to, &numbers, row, &mut scales[at * scale..][..scale]);
        }
        Ok(())
    }
}

impl std::fmt::Display for KvConversion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

impl Cut<'_> {
    /// The numbers of vector `at`.
    fn read(&self, dtype: KvDtype, at: usize, numbers: &mut [f32]) {
        let row = dtype.elements_bytes(numbers.len());
        let elements = &self.elements[at * row..][..row];
        match dtype {
            KvDtype::F32 => {
                for (x, bytes) in numbers.iter_mut().zip(elements.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*bytes);
                }
            }
            KvDtype::F16 => {
                for (x, bytes) in numbers.iter_mut().zip(elements.as_chunks::<2>().0) {
                    *x = f16_widen(u16::from_le_bytes(*bytes));
                }
            }
            KvDtype::Bf16 => {
                for (x, bytes) in numbers.iter_mut().zip(elements.as_chunks::<2>().0) {
                    *x = bf16_widen(u16::from_le_bytes(*bytes));
                }
            }
            KvDtype::Int8 => {
                let scale = self.scale(at);
                for (x, byte) in numbers.iter_mut().zip(elements) {
                    *x = f32::from(byte.cast_signed()) * scale;
                }
            }
            KvDtype::Int4 => {
                let scale = self.scale(at);
                for (pair, byte) in numbers.as_chunks_mut::<2>().0.iter_mut().zip(elements) {
                    *pair = [byte & 15, byte >> 4].map(|x| (f32::from(x) - NIBBLE_ZERO) * scale);
                }
            }
        }
    }

    fn scale(&self, at: usize) -> f32 {
        let scales = self.scales.as_chunks::<2>().0;
        f16_widen(u16::from_le_bytes(scales[at]))
    }
}

/// Stores one vector: its elements, and their scale where the precision has one.
fn write(dtype: KvDtype, numbers: &[f32], row: &mut [u8], scale: &mut [u8]) {
    match dtype {
        KvDtype::F32 => {
            for (bytes, x) in row.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
                *bytes = x.to_le_bytes();
            }
        }
        KvDtype::F16 => {
            for (bytes, x) in row.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                *bytes = f16_round(*x).to_le_bytes();
            }
        }
        KvDtype::Bf16 => {
            for (bytes, x) in row.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                *bytes = bf16_round(*x).to_le_bytes();
            }
        }
        KvDtype::Int8 => {
            let stored = StoredScale::of_bytes(numbers);
            for (byte, x) in row.iter_mut().zip(numbers) {
                *byte = stored.byte(*x).cast_unsigned();
            }
            scale.copy_from_slice(&stored.bits.to_le_bytes());
        }
        KvDtype::Int4 => {
            let stored = StoredScale::of_nibbles(numbers);
            for (byte, pair) in row.iter_mut().zip(numbers.as_chunks::<2>().0) {
                *byte = stored.nibble(pair[0]) | stored.nibble(pair[1]) << 4;
            }
            scale.copy_from_slice(&stored.bits.to_le_bytes());
        }
    }
}
