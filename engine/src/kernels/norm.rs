//! Root-mean-square normalisation.

use crate::simd::{LANES, Lanes};

/// `out[K] = x[K] / sqrt(mean(x²) + eps) * weight[K]`, K a multiple of 16.
///
/// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
#[inline(always)]
pub(crate) fn rms_norm<L: Lanes>(l: L, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = l.splat(inverse_root(l, x, eps));
    let inputs = x.as_chunks::<LANES>().0.iter().zip(weight.as_chunks::<LANES>().0);
    for ((x, weight), out) in inputs.zip(out.as_chunks_mut::<LANES>().0) {
        l.store(l.mul(l.mul(l.load(x), scale), l.load(weight)), out);
    }
}

/// `out[K] += rms_norm(x[K])`.
#[inline(always)]
pub(crate) fn add_rms_norm<L: Lanes>(l: L, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = l.splat(inverse_root(l, x, eps));
    let inputs = x.as_chunks::<LANES>().0.iter().zip(weight.as_chunks::<LANES>().0);
    for ((x, weight), out) in inputs.zip(out.as_chunks_mut::<LANES>().0) {
        let normed = l.mul(l.mul(l.load(x), scale), l.load(weight));
        l.store(l.add(l.load(out), normed), out);
    }
}

/// `rms_norm` of each head of `heads[heads][K]` in place, `weight[K]`.
#[inline(always)]
pub(crate) fn norm_heads<L: Lanes>(l: L, heads: &mut [f32], weight: &[f32], eps: f32) {
    for head in heads.chunks_exact_mut(weight.len()) {
        let scale = l.splat(inverse_root(l, head, eps));
        let weights = weight.as_chunks::<LANES>().0;
        for (x, weight) in head.as_chunks_mut::<LANES>().0.iter_mut().zip(weights) {
            l.store(l.mul(l.mul(l.load(x), scale), l.load(weight)), x);
        }
    }
}

/// `1 / sqrt(mean(x²) + eps)`.
#[inline(always)]
fn inverse_root<L: Lanes>(l: L, x: &[f32], eps: f32) -> f32 {
    let mut squares = l.splat(0.0);
    for x in x.as_chunks::<LANES>().0 {
        let x = l.load(x);
        squares = l.fma(x, x, squares);
    }
    let mean = l.reduce_add(squares) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}
