//! Products of quantised weights with quantised activations: exact integer dots of 32.

use super::{Matmul, Tile, finish};
use crate::kernels::quantize::{BLOCK, QuantView};
use crate::memory::Parts;
use crate::simd::{LANES, Lanes};

/// Bytes of 16 weight rows' four consecutive elements.
const GROUP: usize = 4 * LANES;

/// How far ahead weights are asked for when they stream past once.
const STREAM_AHEAD_BYTES: usize = 4096;

/// A weight format: a block of 32 rows and 32 columns is quants, 32 scales (f16), and maybe 32
/// minima (f16).
pub(super) trait Format {
    const QUANT_BYTES: usize;
    const HAS_MINIMA: bool;
    const BLOCK_BYTES: usize = Self::QUANT_BYTES + if Self::HAS_MINIMA { 128 } else { 64 };

    /// The eight groups of four columns of one half's 16 rows.
    fn unpack<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8];
    fn dot<L: Lanes>(l: L, acc: L::I, w: L::I, a: i32) -> L::I;
    /// Where the dots start; zero when there is none.
    fn starts<'a>(quants: &QuantView<'a>) -> Option<Parts<'a, i32>>;
}

pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q8_0;

#[inline(always)]
fn group(half: &[u8], index: usize) -> &[u8; GROUP] {
    &half.as_chunks::<GROUP>().0[index]
}

/// A byte holds column `i` in its low nibble and column `i + 16` in its high one.
#[inline(always)]
fn unpack_nibbles<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
    let mut out = [l.splat_i(0); 8];
    for j in 0..4 {
        let both = l.load_bytes(group(half, j));
        out[j] = l.low_nibbles(both);
        out[4 + j] = l.high_nibbles(both);
    }
    out
}

impl Format for Q4_0 {
    const QUANT_BYTES: usize = 512;
    const HAS_MINIMA: bool = false;

    #[inline(always)]
    fn unpack<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
        unpack_nibbles(l, half)
    }

    #[inline(always)]
    fn dot<L: Lanes>(l: L, acc: L::I, w: L::I, a: i32) -> L::I {
        l.dot_nibbles(acc, w, a)
    }

    #[inline(always)]
    fn starts<'a>(quants: &QuantView<'a>) -> Option<Parts<'a, i32>> {
        Some(quants.nibble_starts)
    }
}

impl Format for Q4_1 {
    const QUANT_BYTES: usize = 512;
    const HAS_MINIMA: bool = true;

    #[inline(always)]
    fn unpack<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
        unpack_nibbles(l, half)
    }

    #[inline(always)]
    fn dot<L: Lanes>(l: L, acc: L::I, w: L::I, a: i32) -> L::I {
        l.dot_nibbles(acc, w, a)
    }

    #[inline(always)]
    fn starts<'a>(_quants: &QuantView<'a>) -> Option<Parts<'a, i32>> {
        None
    }
}

impl Format for Q8_0 {
    const QUANT_BYTES: usize = 1024;
    const HAS_MINIMA: bool = false;

    #[inline(always)]
    fn unpack<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
        let mut out = [l.splat_i(0); 8];
        for (j, out) in out.iter_mut().enumerate() {
            *out = l.load_bytes(group(half, j));
        }
        out
    }

    #[inline(always)]
    fn dot<L: Lanes>(l: L, acc: L::I, w: L::I, a: i32) -> L::I {
        l.dot_bytes(acc, w, a)
    }

    #[inline(always)]
    fn starts<'a>(quants: &QuantView<'a>) -> Option<Parts<'a, i32>> {
        Some(quants.byte_starts)
    }
}

/// All panels of the job, tokens in tiles of 8, 4, 2, 1.
///
/// # Safety
/// As `matmul`, which has checked the bounds.
#[inline(always)]
pub(super) unsafe fn panels<L: Lanes, F: Format>(l: L, job: &Matmul<'_>) {
    for panel in job.panels.clone() {
        let mut row = 0;
        // SAFETY: rows stay below `job.rows`; the rest is the caller's promise.
        unsafe {
            while L::MANY_REGISTERS && row + 8 <= job.rows {
                halves::<L, F, 8>(l, job, panel, row);
                row += 8;
            }
            while row + 4 <= job.rows {
                halves::<L, F, 4>(l, job, panel, row);
                row += 4;
            }
            if row + 2 <= job.rows {
                halves::<L, F, 2>(l, job, panel, row);
                row += 2;
            }
            if row < job.rows {
                whole::<L, F>(l, job, panel, row);
            }
        }
    }
}

/// `M` tokens, one half of the panel after the other: its weights stay in registers.
///
/// # Safety
/// As `matmul`, for rows `row..row + M`.
#[inline(always)]
unsafe fn halves<L: Lanes, F: Format, const M: usize>(
    l: L,
    job: &Matmul<'_>,
    panel: usize,
    row: usize,
) {
    let blocks = job.weights.panel(panel);
    let next = (row == 0).then(|| job.weights.panel_after(panel)).flatten();
    // SAFETY: the caller's promise.
    unsafe {
        let low = half::<L, F, M>(l, job, blocks, next, 0, row);
        let high = half::<L, F, M>(l, job, blocks, next, 1, row);
        let mut tile = [[l.splat(0.0); 2]; M];
        for m in 0..M {
            tile[m] = [low[m], high[m]];
        }
        finish::<L, M>(l, job, panel, row, &tile);
    }
}

/// # Safety
/// As `matmul`, for rows `row..row + M`.
#[inline(always)]
unsafe fn half<L: Lanes, F: Format, const M: usize>(
    l: L,
    job: &Matmul<'_>,
    blocks: &[u8],
    next: Option<&[u8]>,
    half: usize,
    row: usize,
) -> [L::F; M] {
    let mut acc = [l.splat(0.0); M];
    let columns = Columns::<M>::new::<F>(job, row);
    for (b, block) in blocks.chunks_exact(F::BLOCK_BYTES).enumerate() {
        if let Some(next) = next {
            let start = b * F::BLOCK_BYTES + half * (F::BLOCK_BYTES / 2);
            for line in (start..start + F::BLOCK_BYTES / 2).step_by(64) {
                l.prefetch(next.as_ptr().wrapping_add(line));
            }
        }
        let weights = F::unpack(l, &block[half * (F::QUANT_BYTES / 2)..][..F::QUANT_BYTES / 2]);
        let scales = l.load_f16(half_floats(&block[F::QUANT_BYTES..], half));
        for m in 0..M {
            // SAFETY: `b` counts the blocks of a row, and the rows are in bounds.
            let a = unsafe { columns.at(m, b) };
            let mut sum = l.splat_i(a.start);
            for j in 0..8 {
                sum = F::dot(l, sum, weights[j], a.quants[j]);
            }
            let scale = l.mul(scales, l.splat(a.scale));
            acc[m] = l.fma(l.to_float(sum), scale, acc[m]);
            if F::HAS_MINIMA {
                let minima = l.load_f16(half_floats(&block[F::QUANT_BYTES + 64..], half));
                acc[m] = l.fma(minima, l.splat(a.sum), acc[m]);
            }
        }
    }
    acc
}

/// One token: the panel streams past once, both halves together.
///
/// # Safety
/// As `matmul`, for row `row`.
#[inline(always)]
unsafe fn whole<L: Lanes, F: Format>(l: L, job: &Matmul<'_>, panel: usize, row: usize) {
    let mut acc: Tile<L::F, 1> = [[l.splat(0.0); 2]];
    let columns = Columns::<1>::new::<F>(job, row);
    let blocks = job.weights.panel(panel);
    for (b, block) in blocks.chunks_exact(F::BLOCK_BYTES).enumerate() {
        for line in (0..F::BLOCK_BYTES).step_by(64) {
            l.prefetch(block.as_ptr().wrapping_add(STREAM_AHEAD_BYTES + line));
        }
        // SAFETY: `b` counts the blocks of a row, and the row is in bounds.
        let a = unsafe { columns.at(0, b) };
        for half in 0..2 {
            let quants = &block[half * (F::QUANT_BYTES / 2)..][..F::QUANT_BYTES / 2];
            let weights = F::unpack(l, quants);
            let mut sum = l.splat_i(a.start);
            for j in 0..8 {
                sum = F::dot(l, sum, weights[j], a.quants[j]);
            }
            let scales = l.load_f16(half_floats(&block[F::QUANT_BYTES..], half));
            let scale = l.mul(scales, l.splat(a.scale));
            acc[0][half] = l.fma(l.to_float(sum), scale, acc[0][half]);
            if F::HAS_MINIMA {
                let minima = l.load_f16(half_floats(&block[F::QUANT_BYTES + 64..], half));
                acc[0][half] = l.fma(minima, l.splat(a.sum), acc[0][half]);
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<L, 1>(l, job, panel, row, &acc) }
}

/// The 16 half-precision numbers of one half, as bits.
#[inline(always)]
fn half_floats(bytes: &[u8], half: usize) -> &[u16; LANES] {
    let bytes = &bytes.as_chunks::<32>().0[half];
    // SAFETY: 32 bytes are 16 numbers; panels are aligned to 64 bytes and blocks are a multiple
    // of 64 long, so that they are aligned as well. Every bit pattern is a number.
    unsafe { &*bytes.as_ptr().cast::<[u16; LANES]>() }
}

/// Activations of `M` tokens.
struct Columns<const M: usize> {
    quants: *const i8,
    scales: *const f32,
    sums: *const f32,
    starts: Option<*const i32>,
    k: usize,
    blocks: usize,
}

/// One token's activations in one block.
struct Column<'a> {
    quants: &'a [i32; BLOCK / 4],
    scale: f32,
    sum: f32,
    start: i32,
}

impl<const M: usize> Columns<M> {
    #[inline(always)]
    fn new<F: Format>(job: &Matmul<'_>, row: usize) -> Self {
        let (x, k) = (&job.input.quants, job.input.quants.k);
        let blocks = k / BLOCK;
        let starts =
            F::starts(x).map(|starts| starts.as_ptr().wrapping_add(row * blocks).cast_const());
        Self {
            quants: x.quants.as_ptr().wrapping_add(row * k),
            scales: x.scales.as_ptr().wrapping_add(row * blocks),
            sums: x.sums.as_ptr().wrapping_add(row * blocks),
            starts,
            k,
            blocks,
        }
    }

    /// # Safety
    /// Row `m` of these columns and block `b` exist, and nobody writes them.
    #[inline(always)]
    unsafe fn at(&self, m: usize, b: usize) -> Column<'_> {
        let at = m * self.blocks + b;
        // SAFETY: in bounds by the caller's promise; rows start at multiples of 32 in a buffer
        // that is aligned to a page, so that four bytes form an aligned integer.
        unsafe {
            Column {
                quants: &*self.quants.add(m * self.k + b * BLOCK).cast(),
                scale: *self.scales.add(at),
                sum: *self.sums.add(at),
                start: self.starts.map_or(0, |starts| *starts.add(at)),
            }
        }
    }
}
