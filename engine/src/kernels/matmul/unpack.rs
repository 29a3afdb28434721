//! From packed bits to bytes: the eight groups of four columns of one half's 16 rows.
//!
//! Layouts: `weights`. All that is above a quant's low bits lies behind them.

use crate::simd::{LANES, Lanes};
use crate::weights::IQ4_NL_VALUES;

/// Bytes of 16 weight rows' four consecutive elements.
const GROUP: usize = 4 * LANES;

/// IQ4_NL's values plus 128.
const IQ4_NL_BYTES: [u8; 16] = {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = (IQ4_NL_VALUES[i] as u8) ^ 0x80;
        i += 1;
    }
    out
};

#[inline(always)]
fn group(half: &[u8], index: usize) -> &[u8; GROUP] {
    &half.as_chunks::<GROUP>().0[index]
}

/// Eight bits.
#[inline(always)]
pub(super) fn bytes<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
    let mut out = [l.splat_i(0); 8];
    for (j, out) in out.iter_mut().enumerate() {
        *out = l.load_bytes(group(half, j));
    }
    out
}

/// Four bits: a byte holds column `i` in its low nibble and column `i + 16` in its high one.
#[inline(always)]
pub(super) fn nibbles<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
    let mut out = [l.splat_i(0); 8];
    for j in 0..4 {
        let both = l.load_bytes(group(half, j));
        out[j] = l.low_nibbles(both);
        out[4 + j] = l.high_nibbles(both);
    }
    out
}

/// Nibbles that name a byte.
#[inline(always)]
pub(super) fn iq4_nl<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
    let mut out = nibbles(l, half);
    for j in 0..8 {
        out[j] = l.look_up(&IQ4_NL_BYTES, out[j]);
    }
    out
}

/// Two bits, moved `up`; a byte holds four columns that are four apart.
#[inline(always)]
fn pairs<L: Lanes>(l: L, half: &[u8], first: usize, up: i32) -> [L::I; 8] {
    let mut out = [l.splat_i(0); 8];
    for j in 0..2 {
        let four = l.load_bytes(group(half, first + j));
        for i in 0..4 {
            out[4 * j + i] = l.bits(four, 2 * i as i32 - up, 3 << up);
        }
    }
    out
}

/// Bit `up` of each column set where group `at` of `half` has it; a byte holds eight columns.
#[inline(always)]
fn with_top_bits<L: Lanes>(l: L, x: [L::I; 8], half: &[u8], at: usize, up: i32) -> [L::I; 8] {
    let eight = l.load_bytes(group(half, at));
    let mut out = x;
    for j in 0..8 {
        out[j] = l.or(out[j], l.bits(eight, j as i32 - up, 1 << up));
    }
    out
}

#[inline(always)]
pub(super) fn two_bits<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
    pairs(l, half, 0, 0)
}

#[inline(always)]
pub(super) fn three_bits<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
    with_top_bits(l, pairs(l, half, 0, 0), half, 2, 2)
}

#[inline(always)]
pub(super) fn five_bits<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
    with_top_bits(l, nibbles(l, half), half, 4, 4)
}

#[inline(always)]
pub(super) fn six_bits<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
    let mut out = nibbles(l, half);
    let high = pairs(l, half, 4, 4);
    for j in 0..8 {
        out[j] = l.or(out[j], high[j]);
    }
    out
}
