//! Activations as signed bytes: one scale for each token and 32 elements.

use crate::memory::{Buffer, Parts, Plain};
use crate::simd::{LANES, Lanes};

/// Elements that share a scale, as in the weights' blocks.
pub(crate) const BLOCK: usize = 32;

/// Rows of a tile: with so many sums and as many results AVX-512's registers are full.
pub(crate) const TILE_ROWS: usize = 12;

/// A block whose largest element is below this is taken for zero: the inverse of its scale would
/// overflow.
const TINY: f32 = 1e-30;

/// Four bytes in each integer.
pub(crate) type Quads = [i32; BLOCK / 4];

/// 32 columns of one row as bytes, with what the weights' formats need of them: a cache line, so
/// that threads which write neighbouring rows do not take it from one another.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct RowBlock {
    /// In -127..=127.
    pub(crate) quants: Quads,
    /// What a quant is multiplied with.
    pub(crate) scale: f32,
    /// `scale * Σ q`, what a minimum of 32 is multiplied with.
    pub(crate) sum: f32,
    /// `-8 Σ q`, where the dot of Q4_0 starts.
    pub(crate) nibble_start: i32,
    /// `BYTES_START Σ q`, where the dot of Q8_0 starts.
    pub(crate) byte_start: i32,
    /// `-32 Σ q` of each 16 columns, where the dot of Q6_K starts.
    pub(crate) half_starts: [i32; 2],
    /// `scale * Σ q` of each 16 columns.
    pub(crate) half_sums: [f32; 2],
}

/// 32 columns of a tile's rows. A kernel reads all of it behind one pointer.
pub(crate) type QuantBlock = [RowBlock; TILE_ROWS];

// SAFETY: plain numbers without padding: a cache line.
unsafe impl Plain for RowBlock {}
const _: () = assert!(size_of::<RowBlock>() == 64);

/// Rows of `K` activations as bytes.
pub(crate) struct QuantRows {
    lines: Buffer<RowBlock>,
}

/// A view of [`QuantRows`] for rows of `k` elements.
#[derive(Clone, Copy)]
pub(crate) struct QuantView<'a> {
    pub(crate) k: usize,
    /// `[row / 12][k / 32][row % 12]`
    lines: Parts<'a, RowBlock>,
    /// Row 0 of this view is this one of the buffer.
    first: usize,
}

/// Where a row lies.
#[derive(Clone, Copy)]
pub(crate) struct QuantRow {
    /// The row's tile: blocks in ascending order of columns.
    pub(crate) tile: *mut QuantBlock,
    /// The row within the tile.
    pub(crate) lane: usize,
}

impl QuantRows {
    /// Room for `rows` rows of at most `k` elements.
    ///
    /// # Errors
    /// When the system has no room.
    pub(crate) fn new(rows: usize, k: usize) -> std::io::Result<Self> {
        Ok(Self { lines: Buffer::zeroed(lines_of(rows, k))? })
    }

    /// The same memory for rows of `k` elements.
    ///
    /// # Panics
    /// When `rows` rows of `k` elements do not fit.
    pub(crate) fn view(&mut self, rows: usize, k: usize) -> QuantView<'_> {
        assert!(lines_of(rows, k) <= self.lines.len());
        QuantView { k, lines: self.lines.parts(), first: 0 }
    }
}

/// Lines of `rows` rows.
fn lines_of(rows: usize, k: usize) -> usize {
    rows.next_multiple_of(TILE_ROWS) * (k / BLOCK)
}

impl QuantView<'_> {
    /// All but the first `rows` rows.
    pub(crate) fn skip(&self, rows: usize) -> Self {
        Self { first: self.first + rows, ..*self }
    }

    /// The same memory for rows of `k` elements.
    pub(crate) fn of_width(&self, k: usize) -> Self {
        Self { k, ..*self }
    }

    /// Rows that fit.
    pub(crate) fn rows(&self) -> usize {
        let rows = self.lines.len().checked_div(self.k / BLOCK).unwrap_or(0);
        (rows / TILE_ROWS * TILE_ROWS).saturating_sub(self.first)
    }

    /// Row `row`, which must be one of those that fit.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> QuantRow {
        let row = self.first + row;
        let tile = row / TILE_ROWS * TILE_ROWS * (self.k / BLOCK);
        let tile = self.lines.as_ptr().wrapping_add(tile).cast();
        QuantRow { tile, lane: row % TILE_ROWS }
    }
}

/// Quantises `x[K]` into row `row` of `out`: `q = round(x * 127 / max|x|)` in each block.
///
/// NaN and infinity make their block's scale NaN or infinite, so that they show in every output.
///
/// # Safety
/// Nobody else reads or writes that row until the next barrier.
#[inline(always)]
pub(crate) unsafe fn quantize<L: Lanes>(l: L, x: &[f32], out: &QuantView<'_>, row: usize) {
    assert!(x.len() == out.k && row < out.rows());
    let QuantRow { tile, lane } = out.row(row);
    for (b, pair) in x.as_chunks::<LANES>().0.as_chunks::<2>().0.iter().enumerate() {
        let x = [l.load(&pair[0]), l.load(&pair[1])];
        let bits = l.reduce_max_i(l.max_i(l.abs_bits(x[0]), l.abs_bits(x[1])));
        let max = f32::from_bits(bits as u32);
        let (scale, inverse) = if max < TINY { (0.0, 0.0) } else { (max / 127.0, 127.0 / max) };
        let q = [l.round(l.mul(x[0], l.splat(inverse))), l.round(l.mul(x[1], l.splat(inverse)))];
        let halves = [l.reduce_add_i(q[0]), l.reduce_add_i(q[1])];
        let sum = halves[0].wrapping_add(halves[1]);
        // SAFETY: the row exists and is the caller's.
        let out = unsafe { &mut *tile.wrapping_add(b).cast::<RowBlock>().add(lane) };
        let bytes = bytes_of(&mut out.quants);
        l.store_bytes(q[0], &mut bytes[0]);
        l.store_bytes(q[1], &mut bytes[1]);
        out.scale = scale;
        out.sum = scale * sum as f32;
        out.nibble_start = sum.wrapping_mul(-8);
        out.byte_start = sum.wrapping_mul(L::BYTES_START);
        for half in 0..2 {
            out.half_starts[half] = halves[half].wrapping_mul(-32);
            out.half_sums[half] = scale * halves[half] as f32;
        }
    }
}

/// The bytes of a row's 32 columns, by halves.
#[inline(always)]
fn bytes_of(quads: &mut Quads) -> &mut [[i8; LANES]; 2] {
    // SAFETY: both are 32 bytes, and every pattern is a value of both.
    unsafe { &mut *std::ptr::from_mut(quads).cast() }
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
