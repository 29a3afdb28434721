//! Pages whose elements are halves of bytes. K `[dim / 8][token][4]`, the low halves being the
//! first four dimensions of eight; V `[token][dim / 16][8]`, the low halves being the first eight
//! of sixteen. So no byte belongs to two tokens. On the wire element `2 i` is the low half of byte
//! `i`.

use super::{KvSpan, Pages, SharedPages, Slot};
use crate::kernels::attention::TILE_TOKENS;
use crate::kernels::attention::format::StoredScale;

impl Slot {
    /// The byte of element `d`, and by how much the element is shifted in it.
    #[inline(always)]
    fn nibble(&self, is_value: bool, d: usize) -> (usize, usize) {
        if is_value {
            let v = self.tile + self.dim / 2 * (TILE_TOKENS + self.token);
            (v + d / 16 * 8 + d % 8, d % 16 / 8 * 4)
        } else {
            (self.tile + d / 8 * (4 * TILE_TOKENS) + self.token * 4 + d % 4, d % 8 / 4 * 4)
        }
    }
}

/// `byte` with `nibble` in the half that `shift` names.
fn with(byte: u8, nibble: u8, shift: usize) -> u8 {
    byte & !(15 << shift) | nibble << shift
}

impl Pages {
    /// Places all elements; returns what follows them.
    pub(super) fn write_nibbles<'a>(&mut self, span: &KvSpan<'_>, payload: &'a [u8]) -> &'a [u8] {
        let mut rest = payload;
        for (is_value, slot) in self.map.vectors(span) {
            let (vector, after) = rest.split_at(slot.dim / 2);
            for d in 0..slot.dim {
                let (at, shift) = slot.nibble(is_value, d);
                let nibble = vector[d / 2] >> (d % 2 * 4) & 15;
                self.data[at] = with(self.data[at], nibble, shift);
            }
            rest = after;
        }
        rest
    }

    /// Appends all elements.
    pub(super) fn read_nibbles(&self, span: &KvSpan<'_>, out: &mut Vec<u8>) {
        for (is_value, slot) in self.map.vectors(span) {
            let nibble = |d| {
                let (at, shift) = slot.nibble(is_value, d);
                self.data[at] >> shift & 15
            };
            out.extend((0..slot.dim / 2).map(|i| nibble(2 * i) | nibble(2 * i + 1) << 4));
        }
    }

    pub(super) fn copy_nibbles(&mut self, source: Slot, target: Slot, is_value: bool) {
        for d in 0..source.dim {
            // Both halves of a byte are of one token, at the same place in each slot.
            let (from, shift) = source.nibble(is_value, d);
            if shift == 0 {
                self.data[target.nibble(is_value, d).0] = self.data[from];
            }
        }
    }
}

impl SharedPages<'_> {
    /// # Safety
    /// As [`store`](Self::store); the slot's tile is in bounds.
    pub(super) unsafe fn store_nibbles(&self, slot: Slot, k: &[f32], v: &[f32]) {
        let data = self.data.as_ptr();
        let scales = [StoredScale::of_nibbles(k), StoredScale::of_nibbles(v)];
        for (is_value, (x, scale)) in [false, true].into_iter().zip([k, v].into_iter().zip(scales))
        {
            for (d, x) in x.iter().enumerate() {
                let (at, shift) = slot.nibble(is_value, d);
                // SAFETY: a slot's elements lie within its tile, and no byte belongs to two tokens.
                unsafe { *data.add(at) = with(*data.add(at), scale.nibble(*x), shift) };
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.store_scales(slot, scales) };
    }
}
