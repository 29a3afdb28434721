//! Products of quantised weights with quantised activations: exact integer dots of 32.

use std::marker::PhantomData;

use super::columns::{Columns, half_floats};
use super::{Matmul, PanelRows, STREAM_AHEAD_BYTES, Tile, finish, unpack};
use crate::kernels::quantize::QuantView;
use crate::memory::Parts;
use crate::simd::Lanes;

/// A weight format: a block of 32 rows and 32 columns is quants, 32 scales (f16), and maybe 32
/// minima (f16).
pub(super) trait Format {
    const QUANT_BYTES: usize;
    /// What a quant of zero stands for: 0, a multiple of -8, or -128.
    const ZERO: i32;
    const HAS_MINIMA: bool;
    const BLOCK_BYTES: usize = Self::QUANT_BYTES + if Self::HAS_MINIMA { 128 } else { 64 };
    const SIGNED: bool = Self::ZERO == -128;
    /// What a start is multiplied with: `-8 Σ q` for small bytes.
    const START_TIMES: i32 = if Self::SIGNED { 1 } else { Self::ZERO / -8 };

    /// The eight groups of four columns of one half's 16 rows.
    fn unpack<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8];

    #[inline(always)]
    fn dot<L: Lanes>(l: L, acc: L::I, w: L::I, a: i32) -> L::I {
        if Self::SIGNED { l.dot_bytes(acc, w, a) } else { l.dot_small(acc, w, a) }
    }

    /// Where the dots start; zero when there is none.
    #[inline(always)]
    fn starts<'a>(quants: &QuantView<'a>) -> Option<Parts<'a, i32>> {
        match Self::ZERO {
            0 => None,
            _ if Self::SIGNED => Some(quants.byte_starts),
            _ => Some(quants.nibble_starts),
        }
    }
}

/// Names a format.
macro_rules! format {
    ($name:ident, $bytes:literal, zero $zero:literal, minima $minima:literal, $unpack:ident) => {
        pub(super) struct $name;

        impl Format for $name {
            const QUANT_BYTES: usize = $bytes;
            const ZERO: i32 = $zero;
            const HAS_MINIMA: bool = $minima;

            #[inline(always)]
            fn unpack<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
                unpack::$unpack(l, half)
            }
        }
    };
}

format!(Q4_0, 512, zero -8, minima false, nibbles);
format!(Q4_1, 512, zero 0, minima true, nibbles);
format!(Q5_0, 640, zero -16, minima false, five_bits);
format!(Q5_1, 640, zero 0, minima true, five_bits);
format!(Q8_0, 1024, zero -128, minima false, bytes);
format!(Iq4Nl, 512, zero -128, minima false, iq4_nl);

/// Products of format `F`.
pub(super) struct Products<F>(PhantomData<F>);

impl<F: Format> PanelRows for Products<F> {
    #[inline(always)]
    unsafe fn compute<L: Lanes, const M: usize>(l: L, job: &Matmul<'_>, panel: usize, row: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match M {
                1 => whole::<L, F>(l, job, panel, row),
                _ => halves::<L, F, M>(l, job, panel, row),
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
    let columns = Columns::<M>::new(job, F::starts(&job.input.quants), row);
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
            let mut sum = l.splat_i(a.start * F::START_TIMES);
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
    let columns = Columns::<1>::new(job, F::starts(&job.input.quants), row);
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
            let mut sum = l.splat_i(a.start * F::START_TIMES);
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
