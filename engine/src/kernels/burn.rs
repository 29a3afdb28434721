//! Nothing but dots, nothing but floats, and nothing but reads, as fast as they go: the ceilings
//! that the engine is held against.

use super::matmul::STREAM_AHEAD_BYTES;
use crate::simd::{LANES, Lanes};

/// Chains of dots that do not wait for one another: more than an instruction's latency.
const CHAINS: usize = 12;

/// Operations of a round: a multiplication and an addition are two.
pub(crate) const DOT_ROUND_OPS: usize = CHAINS * LANES * 4 * 2;
pub(crate) const FLOAT_ROUND_OPS: usize = CHAINS * LANES * 2;

/// Runs `rounds` rounds of dots; what it returns only keeps them from being left out.
#[inline(always)]
pub(crate) fn dots<L: Lanes>(l: L, rounds: usize) -> i32 {
    let weights = l.splat_i(std::hint::black_box(0x0102_0304));
    let mut sums = [l.splat_i(0); CHAINS];
    for round in 0..rounds {
        for sum in &mut sums {
            *sum = l.dot_small(*sum, weights, round as i32);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(l.reduce_add_i(*sum)))
}

/// The same of fused multiply-adds.
#[inline(always)]
pub(crate) fn floats<L: Lanes>(l: L, rounds: usize) -> f32 {
    let weights = l.splat(std::hint::black_box(0.5));
    let mut sums = [l.splat(1.0); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = l.fma(*sum, weights, weights);
        }
    }
    sums.iter().fold(0.0, |all, sum| all + l.reduce_add(*sum))
}

/// Reads `bytes` (all but what is left over of 512) once; what it returns only keeps the reads
/// from being left out.
#[inline(always)]
pub(crate) fn read<L: Lanes>(l: L, bytes: &[u8]) -> i32 {
    let mut most = [l.splat_i(0); 8];
    for lines in bytes.as_chunks::<{ 4 * LANES }>().0.as_chunks::<8>().0 {
        for (most, line) in most.iter_mut().zip(lines) {
            l.prefetch(line.as_ptr().wrapping_add(STREAM_AHEAD_BYTES));
            *most = l.max_i(*most, l.load_bytes(line));
        }
    }
    most.iter().fold(0, |all, most| all.max(l.reduce_max_i(*most)))
}
