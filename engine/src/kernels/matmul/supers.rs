//! Products of K-quants with quantised activations: exact integer dots of 32 or 16 columns, and
//! scales and minima that are exact products of a super-block's f16 and a small integer.

use std::marker::PhantomData;

use super::columns::{Column, Columns, half_floats};
use super::{Matmul, PanelRows, STREAM_AHEAD_BYTES, Tile, finish, unpack};
use crate::simd::{LANES, Lanes};

/// Blocks of 32 columns in a super-block.
const BLOCKS: usize = 8;
/// Rows of a panel: bytes of one small integer each.
const PANEL: usize = 2 * LANES;

/// A K-quant. A super-block of 32 rows and 256 columns is `d` (f16), maybe `dmin` (f16), and eight
/// blocks: quants, scales of each part, maybe minima of each part (`weights`).
pub(super) trait Format {
    const QUANT_BYTES: usize;
    /// Parts of a block with a scale of their own: 1, or 2 of 16 columns.
    const PARTS: usize;
    const HAS_MINIMA: bool;
    /// What a quant of zero stands for: 0, or with parts of 16 columns a power of two down to -32.
    const ZERO: i32;
    /// By how much `-32 Σ q` is shifted to give where the dot of a part starts.
    const START_SHIFT: u32 = if Self::ZERO == 0 { 0 } else { (-32 / Self::ZERO).ilog2() };

    const NUMBERS: usize = if Self::HAS_MINIMA { 2 } else { 1 };
    const HEAD_BYTES: usize = Self::NUMBERS * 2 * PANEL;
    const BLOCK_BYTES: usize = Self::QUANT_BYTES + Self::NUMBERS * Self::PARTS * PANEL;
    const SUPER_BYTES: usize = Self::HEAD_BYTES + BLOCKS * Self::BLOCK_BYTES;

    /// The eight groups of four columns of one half's 16 rows.
    fn unpack<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8];
}

/// Names a K-quant.
macro_rules! format {
    ($name:ident, $bytes:literal, zero $zero:literal, parts $parts:literal,
        minima $minima:literal, $unpack:ident) => {
        pub(super) struct $name;

        impl Format for $name {
            const QUANT_BYTES: usize = $bytes;
            const PARTS: usize = $parts;
            const ZERO: i32 = $zero;
            const HAS_MINIMA: bool = $minima;

            #[inline(always)]
            fn unpack<L: Lanes>(l: L, half: &[u8]) -> [L::I; 8] {
                unpack::$unpack(l, half)
            }
        }
    };
}

format!(Q2K, 256, zero 0, parts 2, minima true, two_bits);
format!(Q3K, 384, zero -4, parts 2, minima false, three_bits);
format!(Q4K, 512, zero 0, parts 1, minima true, nibbles);
format!(Q5K, 640, zero 0, parts 1, minima true, five_bits);
format!(Q6K, 768, zero -32, parts 2, minima false, six_bits);

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
    let next = (row == 0).then(|| job.weights.panel_after(panel)).flatten();
    let mut tile = [[l.splat(0.0); 2]; M];
    for half in 0..2 {
        let mut acc = [l.splat(0.0); M];
        let columns = Columns::<M>::new(job, None, row);
        for (s, block) in job.weights.panel(panel).chunks_exact(F::SUPER_BYTES).enumerate() {
            let head = Head::new::<F>(l, block, half);
            for b in 0..BLOCKS {
                if let Some(next) = next {
                    let start = s * F::SUPER_BYTES + F::HEAD_BYTES + b * F::BLOCK_BYTES;
                    let start = start + half * (F::BLOCK_BYTES / 2);
                    for line in (start..start + F::BLOCK_BYTES / 2).step_by(64) {
                        l.prefetch(next.as_ptr().wrapping_add(line));
                    }
                }
                let block = Block::new::<F>(l, &head, block, half, b);
                for m in 0..M {
                    // SAFETY: blocks are those of a row, and the rows are in bounds.
                    let a = unsafe { columns.at(m, s * BLOCKS + b) };
                    acc[m] = block.multiply::<F>(l, &a, acc[m]);
                }
            }
        }
        for m in 0..M {
            tile[m][half] = acc[m];
        }
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<L, M>(l, job, panel, row, &tile) }
}

/// One token: the panel streams past once, both halves together.
///
/// # Safety
/// As `matmul`, for row `row`.
#[inline(always)]
unsafe fn whole<L: Lanes, F: Format>(l: L, job: &Matmul<'_>, panel: usize, row: usize) {
    let mut acc: Tile<L::F, 1> = [[l.splat(0.0); 2]];
    let columns = Columns::<1>::new(job, None, row);
    for (s, block) in job.weights.panel(panel).chunks_exact(F::SUPER_BYTES).enumerate() {
        let heads = [Head::new::<F>(l, block, 0), Head::new::<F>(l, block, 1)];
        for b in 0..BLOCKS {
            let start = F::HEAD_BYTES + b * F::BLOCK_BYTES + STREAM_AHEAD_BYTES;
            for line in (start..start + F::BLOCK_BYTES).step_by(64) {
                l.prefetch(block.as_ptr().wrapping_add(line));
            }
            // SAFETY: blocks are those of a row, and the row is in bounds.
            let a = unsafe { columns.at(0, s * BLOCKS + b) };
            for half in 0..2 {
                let block = Block::new::<F>(l, &heads[half], block, half, b);
                acc[0][half] = block.multiply::<F>(l, &a, acc[0][half]);
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<L, 1>(l, job, panel, row, &acc) }
}

/// What a super-block says about 16 rows.
struct Head<L: Lanes> {
    d: L::F,
    dmin: L::F,
}

impl<L: Lanes> Head<L> {
    #[inline(always)]
    fn new<F: Format>(l: L, block: &[u8], half: usize) -> Self {
        let d = l.load_f16(half_floats(block, half));
        let dmin = if F::HAS_MINIMA {
            l.load_f16(half_floats(&block[2 * PANEL..], half))
        } else {
            l.splat(0.0)
        };
        Self { d, dmin }
    }
}

/// 32 columns of 16 rows.
struct Block<L: Lanes> {
    weights: [L::I; 8],
    scales: [L::F; 2],
    minima: [L::F; 2],
}

impl<L: Lanes> Block<L> {
    /// Block `b` of the super-block `bytes`, unpacked; what the format lacks is zero.
    #[inline(always)]
    fn new<F: Format>(l: L, head: &Head<L>, bytes: &[u8], half: usize, b: usize) -> Self {
        let bytes = &bytes[F::HEAD_BYTES + b * F::BLOCK_BYTES..][..F::BLOCK_BYTES];
        let (quants, numbers) = bytes.split_at(F::QUANT_BYTES);
        let quants = &quants[half * (F::QUANT_BYTES / 2)..][..F::QUANT_BYTES / 2];
        let numbers = numbers.as_chunks::<LANES>().0;
        let mut scales = [l.splat(0.0); 2];
        let mut minima = [l.splat(0.0); 2];
        for part in 0..F::PARTS {
            scales[part] = l.mul(head.d, small_integers(l, &numbers[2 * part + half]));
            if F::HAS_MINIMA {
                let integers = small_integers(l, &numbers[2 * (F::PARTS + part) + half]);
                minima[part] = l.mul(head.dmin, integers);
            }
        }
        Self { weights: F::unpack(l, quants), scales, minima }
    }

    /// `acc = dot * (scale * da) + acc`, then `acc = minimum * (da * -Σ q) + acc`, part by part.
    #[inline(always)]
    fn multiply<F: Format>(&self, l: L, a: &Column<'_>, acc: L::F) -> L::F {
        let mut acc = acc;
        if F::PARTS == 1 {
            let mut sum = l.splat_i(0);
            for j in 0..8 {
                sum = l.dot_small(sum, self.weights[j], a.quants[j]);
            }
            acc = l.fma(l.to_float(sum), l.mul(self.scales[0], l.splat(a.scale)), acc);
            if F::HAS_MINIMA {
                acc = l.fma(self.minima[0], l.splat(-a.sum), acc);
            }
            return acc;
        }
        for part in 0..2 {
            let start = if F::ZERO == 0 { 0 } else { a.half_starts[part] >> F::START_SHIFT };
            let mut sum = l.splat_i(start);
            for j in 4 * part..4 * part + 4 {
                sum = l.dot_small(sum, self.weights[j], a.quants[j]);
            }
            acc = l.fma(l.to_float(sum), l.mul(self.scales[part], l.splat(a.scale)), acc);
            if F::HAS_MINIMA {
                let sum = a.scale * (a.half_starts[part] >> 5) as f32;
                acc = l.fma(self.minima[part], l.splat(sum), acc);
            }
        }
        acc
    }
}

/// Sixteen signed bytes as numbers.
#[inline(always)]
fn small_integers<L: Lanes>(l: L, bytes: &[u8; LANES]) -> L::F {
    l.to_float(l.load_signed(bytes))
}
