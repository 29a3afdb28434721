//! Nothing but dots, as fast as they go: the ceiling that products are held against.

use crate::simd::{LANES, Lanes};

/// Chains of dots that do not wait for one another: more than an instruction's latency.
const CHAINS: usize = 12;

/// Operations of one round: a multiplication and an addition are two.
pub(crate) const ROUND_OPS: usize = CHAINS * LANES * 4 * 2;

/// Runs `rounds` rounds; what it returns only keeps them from being left out.
#[inline(always)]
pub(crate) fn burn<L: Lanes>(l: L, rounds: usize) -> i32 {
    let weights = l.splat_i(std::hint::black_box(0x0102_0304));
    let mut sums = [l.splat_i(0); CHAINS];
    for round in 0..rounds {
        for sum in &mut sums {
            *sum = l.dot_small(*sum, weights, round as i32);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(l.reduce_add_i(*sum)))
}
