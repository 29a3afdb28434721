//! Products of quantised weights with quantised activations, for all formats.
//!
//! Few rows go straight over the packed weights, which stream past once. For more rows a panel is
//! unpacked first, and tiles of rows go over it while it stays in the near caches. The order of
//! operations is the same.

use std::marker::PhantomData;

use super::{Matmul, PanelRows, STREAM_AHEAD_BYTES, Tile, finish};
use crate::kernels::quantize::{BLOCK, QuantBlock, RowBlock, TILE_ROWS};
use crate::memory::Plain;
use crate::simd::{LANES, Lanes};

/// 16 rows and 32 columns of a panel, unpacked.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct PanelBlock {
    /// `[group of four columns][row][4]`
    pub(super) groups: [[u8; 4 * LANES]; BLOCK / 4],
    /// Of each part; a block has one part, or two of 16 columns.
    pub(super) scales: [[f32; LANES]; 2],
    /// What is added, with the sum of the activations; of each part.
    pub(super) minima: [[f32; LANES]; 2],
}

// SAFETY: plain numbers without padding: twelve cache lines.
unsafe impl Plain for PanelBlock {}
const _: () = assert!(size_of::<PanelBlock>() == 12 * 64);

/// Blocks that a panel of `k` columns is unpacked into: its lower half, then its upper one.
fn panel_blocks(k: usize) -> usize {
    2 * k / BLOCK
}

/// What products of a format's unpacked blocks are made of.
pub(super) trait Scheme {
    /// Parts of a block with a scale of their own: 1, or 2 of 16 columns.
    const PARTS: usize;
    const HAS_MINIMA: bool;
    /// What a quant of zero stands for: 0, a multiple of -8, or -128; with two parts a power of two
    /// down to -32.
    const ZERO: i32;
    const IS_SIGNED: bool = Self::ZERO == -128;
    /// What a start is multiplied with: `-8 Σ q` for small bytes.
    const START_TIMES: i32 = if Self::IS_SIGNED { 1 } else { Self::ZERO / -8 };
    /// By how much `-32 Σ q` is shifted to give where the dot of one of two parts starts.
    const START_SHIFT: u32 =
        if Self::ZERO == 0 || Self::PARTS == 1 { 0 } else { (-32 / Self::ZERO).ilog2() };

    #[inline(always)]
    fn dot<L: Lanes>(l: L, acc: L::I, w: L::I, a: i32) -> L::I {
        if Self::IS_SIGNED { l.dot_bytes(acc, w, a) } else { l.dot_small(acc, w, a) }
    }

    /// Where the dot of part `part` of a row starts.
    #[inline(always)]
    fn start(x: &RowBlock, part: usize) -> i32 {
        match (Self::ZERO, Self::PARTS) {
            (0, _) => 0,
            (-128, _) => x.byte_start,
            (_, 1) => x.nibble_start.wrapping_mul(Self::START_TIMES),
            _ => x.half_starts[part] >> Self::START_SHIFT,
        }
    }

    /// What the minima of part `part` are multiplied with.
    #[inline(always)]
    fn sum(x: &RowBlock, part: usize) -> f32 {
        if Self::PARTS == 1 { x.sum } else { x.half_sums[part] }
    }
}

/// 16 rows and 32 columns in registers.
pub(super) struct Unpacked<L: Lanes> {
    /// Groups of four columns.
    pub(super) groups: [L::I; BLOCK / 4],
    /// Of each part; what the format lacks is zero.
    pub(super) scales: [L::F; 2],
    /// What is added, with the sum of the activations; of each part.
    pub(super) minima: [L::F; 2],
}

/// How a format stores a panel: blocks, or super-blocks of several blocks of 32 columns.
pub(super) trait Format: Scheme {
    /// Blocks of a super-block.
    const BLOCKS: usize;
    /// Bytes of a super-block of 32 rows.
    const BYTES: usize;
    /// What a super-block says about all of its blocks.
    type Head<L: Lanes>;

    /// Of the 16 rows of half `half`.
    fn head<L: Lanes>(l: L, bytes: &[u8], half: usize) -> Self::Head<L>;

    /// Block `block` of the super-block `bytes`, its 16 rows of half `half`.
    fn unpack<L: Lanes>(
        l: L,
        head: &Self::Head<L>,
        bytes: &[u8],
        half: usize,
        block: usize,
    ) -> Unpacked<L>;
}

/// Products of format `F`.
pub(super) struct Products<F>(PhantomData<F>);

/// Rows of which each tile reads the packed weights itself; for more they are unpacked first.
const FEW_ROWS: usize = 8;

impl<F: Format> PanelRows for Products<F> {
    #[inline(always)]
    unsafe fn row<L: Lanes>(l: L, job: &Matmul<'_>, panel: usize, row: usize) {
        // SAFETY: the caller's promise.
        unsafe { packed::<L, F, 1>(l, job, panel, row) };
    }

    #[inline(always)]
    unsafe fn tiles<L: Lanes>(l: L, job: &Matmul<'_>) {
        // SAFETY: the caller's promise.
        unsafe {
            if job.rows <= FEW_ROWS {
                few_rows::<L, F>(l, job);
            } else {
                many_rows::<L, F>(l, job);
            }
        }
    }
}

/// Rows in tiles of 8, 4, 2, 1, over packed weights.
///
/// # Safety
/// As `matmul`.
#[inline(always)]
unsafe fn few_rows<L: Lanes, F: Format>(l: L, job: &Matmul<'_>) {
    for panel in job.panels.clone() {
        let mut row = 0;
        while row < job.rows {
            let fits = (job.rows - row).min(TILE_ROWS - job.input.quants.row(row).lane);
            // SAFETY: the rows are the job's and lie in one tile; the rest is the caller's promise.
            row += unsafe {
                match fits {
                    8.. if L::MANY_REGISTERS => packed::<L, F, 8>(l, job, panel, row),
                    4.. => packed::<L, F, 4>(l, job, panel, row),
                    2.. => packed::<L, F, 2>(l, job, panel, row),
                    _ => packed::<L, F, 1>(l, job, panel, row),
                }
            };
        }
    }
}

/// Rows in tiles of 12, 8, 4, 2, 1, over panels unpacked one by one.
///
/// # Safety
/// As `matmul`; the scratch is this thread's.
#[inline(always)]
unsafe fn many_rows<L: Lanes, F: Format>(l: L, job: &Matmul<'_>) {
    // SAFETY: the caller's promise.
    let unpacked = unsafe { job.scratch.of_mut(0..panel_blocks(job.weights.k())) };
    for panel in job.panels.clone() {
        unpack_panel::<L, F>(l, job.weights.panel(panel), unpacked);
        let mut row = 0;
        while row < job.rows {
            let next = if row == 0 { job.weights.panel_after(panel) } else { None };
            let fits = (job.rows - row).min(TILE_ROWS - job.input.quants.row(row).lane);
            let panel = (panel, &*unpacked, next.unwrap_or(&[]));
            // SAFETY: the rows are the job's and lie in one tile; the rest is the caller's promise.
            row += unsafe {
                match fits {
                    12 if L::MANY_REGISTERS => tile::<L, F, 12>(l, job, panel, row),
                    8.. if L::MANY_REGISTERS => tile::<L, F, 8>(l, job, panel, row),
                    4.. => tile::<L, F, 4>(l, job, panel, row),
                    2.. => tile::<L, F, 2>(l, job, panel, row),
                    _ => tile::<L, F, 1>(l, job, panel, row),
                }
            };
        }
    }
}

/// Fills `out`, [`panel_blocks`] of them, from a panel's bytes.
#[inline(always)]
fn unpack_panel<L: Lanes, F: Format>(l: L, panel: &[u8], out: &mut [PanelBlock]) {
    let (low, high) = out.split_at_mut(panel.len() / F::BYTES * F::BLOCKS);
    let supers = low.chunks_exact_mut(F::BLOCKS).zip(high.chunks_exact_mut(F::BLOCKS));
    for (bytes, (low, high)) in panel.chunks_exact(F::BYTES).zip(supers) {
        for (half, out) in [low, high].into_iter().enumerate() {
            let head = F::head(l, bytes, half);
            for (b, out) in out.iter_mut().enumerate() {
                let block = F::unpack(l, &head, bytes, half, b);
                for (group, out) in block.groups.into_iter().zip(&mut out.groups) {
                    l.store_quads(group, out);
                }
                for part in 0..F::PARTS {
                    l.store(block.scales[part], &mut out.scales[part]);
                    if F::HAS_MINIMA {
                        l.store(block.minima[part], &mut out.minima[part]);
                    }
                }
            }
        }
    }
}

/// Rows `row..row + M` over one unpacked panel, its lower half first, while memory is asked for the
/// next; returns `M`.
///
/// # Safety
/// As `matmul`, for these rows, which lie in one tile.
#[inline(always)]
unsafe fn tile<L: Lanes, F: Scheme, const M: usize>(
    l: L,
    job: &Matmul<'_>,
    (panel, unpacked, next): (usize, &[PanelBlock], &[u8]),
    row: usize,
) -> usize {
    let at = job.input.quants.row(row);
    let blocks = unpacked.len() / 2;
    let step = next.len() / unpacked.len();
    let mut tile: Tile<L::F, M> = [[l.splat(0.0); 2]; M];
    for half in 0..2 {
        let mut acc = [l.splat(0.0); M];
        for (b, w) in unpacked[half * blocks..][..blocks].iter().enumerate() {
            let start = (half * blocks + b) * step;
            for line in (start..start + step).step_by(64) {
                l.prefetch(next.as_ptr().wrapping_add(line));
            }
            // SAFETY: `b` counts the blocks of a row; the rest is the caller's promise.
            let x = unsafe { &*at.tile.wrapping_add(b) };
            for part in 0..F::PARTS {
                let numbers = || (l.load(&w.scales[part]), l.load(&w.minima[part]));
                let group = |j: usize| l.load_bytes(&w.groups[j]);
                multiply::<L, F, M>(l, x, (at.lane, part), group, numbers, &mut acc);
            }
        }
        for m in 0..M {
            tile[m][half] = acc[m];
        }
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<L, M>(l, job, panel, row, &tile) };
    M
}

/// Rows `row..row + M` over one packed panel, which streams past; returns `M`. With many rows the
/// halves go one after the other, since there are no registers for both.
///
/// # Safety
/// As `matmul`, for these rows, which lie in one tile.
#[inline(always)]
unsafe fn packed<L: Lanes, F: Format, const M: usize>(
    l: L,
    job: &Matmul<'_>,
    panel: usize,
    row: usize,
) -> usize {
    let at = job.input.quants.row(row);
    let mut acc = [[l.splat(0.0); M]; 2];
    let passes = if M > 4 { 2 } else { 1 };
    let panel_bytes = job.weights.panel(panel);
    for pass in 0..passes {
        let halves = if passes == 2 { pass..pass + 1 } else { 0..2 };
        for (s, bytes) in panel_bytes.chunks_exact(F::BYTES).enumerate() {
            let heads = [F::head(l, bytes, 0), F::head(l, bytes, 1)];
            for b in 0..F::BLOCKS {
                if row == 0 {
                    let (nth, len) = (s * F::BLOCKS + b, F::BYTES / F::BLOCKS);
                    // Each of two passes asks for half of the next panel, line after line, so that
                    // memory is read at one pace.
                    let start = match passes {
                        1 => nth * len + STREAM_AHEAD_BYTES,
                        _ => panel_bytes.len() + pass * panel_bytes.len() / 2 + nth * len / 2,
                    };
                    for line in (0..len / passes).step_by(64) {
                        l.prefetch(panel_bytes.as_ptr().wrapping_add(start + line));
                    }
                }
                // SAFETY: blocks are those of a row; the rest is the caller's promise.
                let x = unsafe { &*at.tile.wrapping_add(s * F::BLOCKS + b) };
                for half in halves.clone() {
                    let block = F::unpack(l, &heads[half], bytes, half, b);
                    for part in 0..F::PARTS {
                        let numbers = || (block.scales[part], block.minima[part]);
                        let group = |j: usize| block.groups[j];
                        multiply::<L, F, M>(l, x, (at.lane, part), group, numbers, &mut acc[half]);
                    }
                }
            }
        }
    }
    let mut tile: Tile<L::F, M> = [[l.splat(0.0); 2]; M];
    for m in 0..M {
        tile[m] = [acc[0][m], acc[1][m]];
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<L, M>(l, job, panel, row, &tile) };
    M
}

/// One part of a block for `M` rows: `acc = dot * (scale * da) + acc`, then with minima
/// `acc = minimum * (da * Σ q) + acc`. Dots of different rows alternate, since each waits for the
/// one before it in its chain.
#[inline(always)]
fn multiply<L: Lanes, F: Scheme, const M: usize>(
    l: L,
    x: &QuantBlock,
    (lane, part): (usize, usize),
    group: impl Fn(usize) -> L::I,
    numbers: impl Fn() -> (L::F, L::F),
    acc: &mut [L::F; M],
) {
    assert!(lane + M <= TILE_ROWS);
    let mut sums = [l.splat_i(0); M];
    for m in 0..M {
        sums[m] = l.splat_i(F::start(&x[lane + m], part));
    }
    let groups = BLOCK / 4 / F::PARTS;
    for j in part * groups..(part + 1) * groups {
        let weights = group(j);
        for m in 0..M {
            sums[m] = F::dot(l, sums[m], weights, x[lane + m].quants[j]);
        }
    }
    let (scales, minima) = numbers();
    for m in 0..M {
        let scale = l.mul(scales, l.splat(x[lane + m].scale));
        acc[m] = l.fma(l.to_float(sums[m]), scale, acc[m]);
        if F::HAS_MINIMA {
            acc[m] = l.fma(minima, l.splat(F::sum(&x[lane + m], part)), acc[m]);
        }
    }
}
