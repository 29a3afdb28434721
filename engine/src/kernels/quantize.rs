//! Activations as signed bytes: one scale for each token and 32 elements.

use crate::memory::{Buffer, Parts};
use crate::simd::{LANES, Lanes};

/// Elements that share a scale, as in the weights' blocks.
pub(crate) const BLOCK: usize = 32;

/// A block whose largest element is below this is taken for zero: the inverse of its scale would
/// overflow.
const TINY: f32 = 1e-30;

/// Rows of `K` activations as bytes, with what the weights' formats need of each block.
pub(crate) struct QuantRows {
    quants: Buffer<i8>,
    scales: Buffer<f32>,
    nibble_starts: Buffer<i32>,
    byte_starts: Buffer<i32>,
    half_starts: Buffer<[i32; 2]>,
    sums: Buffer<f32>,
    capacity: usize,
}

/// A view of [`QuantRows`] for rows of `k` elements.
#[derive(Clone, Copy)]
pub(crate) struct QuantView<'a> {
    pub(crate) k: usize,
    /// `[row][k]` in -127..=127.
    pub(crate) quants: Parts<'a, i8>,
    /// `[row][k / 32]`: what a quant is multiplied with.
    pub(crate) scales: Parts<'a, f32>,
    /// `[row][k / 32]`: `-8 Σ q`, where the dot of Q4_0 starts.
    pub(crate) nibble_starts: Parts<'a, i32>,
    /// `[row][k / 32]`: `BYTES_START Σ q`, where the dot of Q8_0 starts.
    pub(crate) byte_starts: Parts<'a, i32>,
    /// `[row][k / 32]`: `-32 Σ q` of each 16 elements, where the dot of Q6_K starts.
    pub(crate) half_starts: Parts<'a, [i32; 2]>,
    /// `[row][k / 32]`: `scale * Σ q`, what a minimum of 32 is multiplied with.
    pub(crate) sums: Parts<'a, f32>,
}

impl QuantRows {
    /// Room for `rows` rows of at most `k` elements.
    ///
    /// # Errors
    /// When the system has no room.
    pub(crate) fn new(rows: usize, k: usize) -> std::io::Result<Self> {
        let blocks = rows * k / BLOCK;
        Ok(Self {
            quants: Buffer::zeroed(rows * k)?,
            scales: Buffer::zeroed(blocks)?,
            nibble_starts: Buffer::zeroed(blocks)?,
            byte_starts: Buffer::zeroed(blocks)?,
            half_starts: Buffer::zeroed(blocks)?,
            sums: Buffer::zeroed(blocks)?,
            capacity: rows * k,
        })
    }

    /// The same memory for rows of `k` elements.
    ///
    /// # Panics
    /// When `rows` rows of `k` elements do not fit.
    pub(crate) fn view(&mut self, rows: usize, k: usize) -> QuantView<'_> {
        assert!(rows * k <= self.capacity);
        QuantView {
            k,
            quants: self.quants.parts(),
            scales: self.scales.parts(),
            nibble_starts: self.nibble_starts.parts(),
            byte_starts: self.byte_starts.parts(),
            half_starts: self.half_starts.parts(),
            sums: self.sums.parts(),
        }
    }
}

impl QuantView<'_> {
    /// All but the first `rows` rows.
    pub(crate) fn skip(&self, rows: usize) -> Self {
        let blocks = rows * self.k / BLOCK;
        Self {
            k: self.k,
            quants: self.quants.skip(rows * self.k),
            scales: self.scales.skip(blocks),
            nibble_starts: self.nibble_starts.skip(blocks),
            byte_starts: self.byte_starts.skip(blocks),
            half_starts: self.half_starts.skip(blocks),
            sums: self.sums.skip(blocks),
        }
    }
}

/// One row of a [`QuantView`].
struct QuantRow<'a> {
    quants: &'a mut [i8],
    scales: &'a mut [f32],
    nibble_starts: &'a mut [i32],
    byte_starts: &'a mut [i32],
    half_starts: &'a mut [[i32; 2]],
    sums: &'a mut [f32],
}

/// Quantises `x[K]` into row `row` of `out`: `q = round(x * 127 / max|x|)` in each block.
///
/// NaN and infinity make their block's scale NaN or infinite, so that they show in every output.
///
/// # Safety
/// Nobody else reads or writes that row until the next barrier.
#[inline(always)]
pub(crate) unsafe fn quantize<L: Lanes>(l: L, x: &[f32], out: &QuantView<'_>, row: usize) {
    let k = out.k;
    assert!(x.len() == k);
    let blocks = row * k / BLOCK..(row + 1) * k / BLOCK;
    // SAFETY: the caller owns this row.
    let out = unsafe {
        QuantRow {
            quants: out.quants.of_mut(row * k..(row + 1) * k),
            scales: out.scales.of_mut(blocks.clone()),
            nibble_starts: out.nibble_starts.of_mut(blocks.clone()),
            byte_starts: out.byte_starts.of_mut(blocks.clone()),
            half_starts: out.half_starts.of_mut(blocks.clone()),
            sums: out.sums.of_mut(blocks),
        }
    };
    let quants = out.quants.as_chunks_mut::<LANES>().0;
    for (b, pair) in x.as_chunks::<LANES>().0.as_chunks::<2>().0.iter().enumerate() {
        let x = [l.load(&pair[0]), l.load(&pair[1])];
        let bits = l.reduce_max_i(l.max_i(l.abs_bits(x[0]), l.abs_bits(x[1])));
        let max = f32::from_bits(bits as u32);
        let (scale, inverse) = if max < TINY { (0.0, 0.0) } else { (max / 127.0, 127.0 / max) };
        let q = [l.round(l.mul(x[0], l.splat(inverse))), l.round(l.mul(x[1], l.splat(inverse)))];
        l.store_bytes(q[0], &mut quants[2 * b]);
        l.store_bytes(q[1], &mut quants[2 * b + 1]);
        let halves = [l.reduce_add_i(q[0]), l.reduce_add_i(q[1])];
        let sum = halves[0].wrapping_add(halves[1]);
        out.scales[b] = scale;
        out.nibble_starts[b] = sum.wrapping_mul(-8);
        out.byte_starts[b] = sum.wrapping_mul(L::BYTES_START);
        out.half_starts[b] = halves.map(|sum| sum.wrapping_mul(-32));
        out.sums[b] = scale * sum as f32;
    }
}

/// Quantises `x[K]` with one scale, `q = round(x * 127 / max|x|)`; `(scale, Σ q)`.
///
/// NaN and infinity make the scale NaN or infinite.
///
/// # Panics
/// When `quants` is not as long as `x`, or that is no multiple of 16.
#[inline(always)]
pub(crate) fn quantize_vector<L: Lanes>(l: L, x: &[f32], quants: &mut [i8]) -> (f32, i32) {
    assert!(x.len() == quants.len() && x.len().is_multiple_of(LANES));
    let x = x.as_chunks::<LANES>().0;
    let mut bits = l.splat_i(0);
    for x in x {
        bits = l.max_i(bits, l.abs_bits(l.load(x)));
    }
    let max = f32::from_bits(l.reduce_max_i(bits) as u32);
    let (scale, inverse) = if max < TINY { (0.0, 0.0) } else { (max / 127.0, 127.0 / max) };
    let mut sum = 0i32;
    for (x, quants) in x.iter().zip(quants.as_chunks_mut::<LANES>().0) {
        let q = l.round(l.mul(l.load(x), l.splat(inverse)));
        l.store_bytes(q, quants);
        sum = sum.wrapping_add(l.reduce_add_i(q));
    }
    (scale, sum)
}
