//! Root-mean-square normalisation.

use crate::simd::{LANES, Lanes};

/// `out[K] = x[K] / sqrt(mean(x²) + eps) * weight[K]`, K a multiple of 16.
///
/// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
#[inline(always)]
pub(crate) fn rms_norm<L: Lanes>(l: L, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut squares = l.splat(0.0);
    for x in x.as_chunks::<LANES>().0 {
        let x = l.load(x);
        squares = l.fma(x, x, squares);
    }
    let mean = l.reduce_add(squares) / x.len() as f32;
    let scale = l.splat(1.0 / (mean + eps).sqrt());
    let inputs = x.as_chunks::<LANES>().0.iter().zip(weight.as_chunks::<LANES>().0);
    for ((x, weight), out) in inputs.zip(out.as_chunks_mut::<LANES>().0) {
        l.store(l.mul(l.mul(l.load(x), scale), l.load(weight)), out);
    }
}
