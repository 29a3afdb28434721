//! Products of floating-point weights with `f32` activations: one fused chain along K.
//!
//! Few rows read the weights as they are stored, while they stream past. For more rows a panel that
//! is not of `f32` is widened first, which is exact, and tiles of rows go over it while it stays in
//! the near caches.

use std::marker::PhantomData;

use super::{Matmul, PanelRows, STREAM_AHEAD_BYTES, Tile, finish};
use crate::simd::{LANES, Lanes};

/// 32 rows of one column.
pub(super) type Column<T> = [[T; LANES]; 2];

/// From so many rows on a panel is widened first.
const WIDENED_ROWS: usize = 24;
/// Rows of the largest tile.
const MOST_ROWS: usize = 12;

/// A floating-point format; a panel is `[k][32 rows]`.
pub(super) trait Format {
    type Stored: Copy;
    const IS_WIDE: bool = false;

    fn load<L: Lanes>(l: L, x: &[Self::Stored; LANES]) -> L::F;
}

pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct F32;

impl Format for F16 {
    type Stored = u16;

    #[inline(always)]
    fn load<L: Lanes>(l: L, x: &[u16; LANES]) -> L::F {
        l.load_f16(x)
    }
}

impl Format for Bf16 {
    type Stored = u16;

    #[inline(always)]
    fn load<L: Lanes>(l: L, x: &[u16; LANES]) -> L::F {
        l.load_bf16(x)
    }
}

impl Format for F32 {
    type Stored = f32;
    const IS_WIDE: bool = true;

    #[inline(always)]
    fn load<L: Lanes>(l: L, x: &[f32; LANES]) -> L::F {
        l.load(x)
    }
}

/// Products of format `F`.
pub(super) struct Products<F>(PhantomData<F>);

impl<F: Format> PanelRows for Products<F> {
    #[inline(always)]
    unsafe fn row<L: Lanes>(l: L, job: &Matmul<'_>, panel: usize, row: usize) {
        // SAFETY: the caller's promise.
        unsafe { tile::<L, F, 1, true>(l, job, (panel, columns::<F>(job, panel)), row) };
    }

    #[inline(always)]
    unsafe fn tiles<L: Lanes>(l: L, job: &Matmul<'_>) {
        let k = job.weights.k();
        for panel in job.panels.clone() {
            let stored = columns::<F>(job, panel);
            // SAFETY: the scratch is this thread's, and `matmul` has checked that it holds `k`
            // columns; the rest is the caller's promise.
            unsafe {
                let next = job.weights.panel_after(panel).unwrap_or(&[]);
                if job.rows < WIDENED_ROWS {
                    all_rows::<L, F, true>(l, job, (panel, stored), &[]);
                } else if F::IS_WIDE {
                    all_rows::<L, F, false>(l, job, (panel, stored), next);
                } else {
                    let scratch = job.scratch.as_ptr().cast::<Column<f32>>();
                    let wide = std::slice::from_raw_parts_mut(scratch, k);
                    for (stored, wide) in stored.iter().zip(&mut *wide) {
                        l.store(F::load(l, &stored[0]), &mut wide[0]);
                        l.store(F::load(l, &stored[1]), &mut wide[1]);
                    }
                    all_rows::<L, F32, false>(l, job, (panel, wide), next);
                }
            }
        }
    }
}

/// The columns of panel `panel`.
#[inline(always)]
fn columns<'a, F: Format>(job: &Matmul<'a>, panel: usize) -> &'a [Column<F::Stored>] {
    let bytes = job.weights.panel(panel);
    assert!(bytes.len() == job.weights.k() * size_of::<Column<F::Stored>>());
    // SAFETY: a panel holds `k` columns of 32 elements, aligned to 64 bytes.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), job.weights.k()) }
}

/// All rows over one panel, in tiles of 12, 8, 4, 2, 1. `STREAMS`: each tile asks memory
/// for the panel's columns ahead of itself; otherwise memory is asked for `next` meanwhile.
///
/// # Safety
/// As `matmul`, for this panel.
#[inline(always)]
unsafe fn all_rows<L: Lanes, F: Format, const STREAMS: bool>(
    l: L,
    job: &Matmul<'_>,
    panel: (usize, &[Column<F::Stored>]),
    next: &[u8],
) {
    let step = (next.len() * MOST_ROWS).div_ceil(job.rows);
    let mut asks = next.chunks(step.max(1).next_multiple_of(64));
    let mut row = 0;
    while row < job.rows {
        for line in asks.next().unwrap_or(&[]).chunks(64) {
            l.prefetch(line.as_ptr());
        }
        // SAFETY: rows stay below `job.rows`; the rest is the caller's promise.
        row += unsafe {
            match job.rows - row {
                12.. if L::MANY_REGISTERS => tile::<L, F, 12, STREAMS>(l, job, panel, row),
                8.. if L::MANY_REGISTERS => tile::<L, F, 8, STREAMS>(l, job, panel, row),
                4.. => tile::<L, F, 4, STREAMS>(l, job, panel, row),
                2.. => tile::<L, F, 2, STREAMS>(l, job, panel, row),
                _ => tile::<L, F, 1, STREAMS>(l, job, panel, row),
            }
        };
    }
}

/// Computes rows `row..row + M` of a panel; returns `M`.
///
/// # Safety
/// As `matmul`, for these rows.
#[inline(always)]
unsafe fn tile<L: Lanes, F: Format, const M: usize, const STREAMS: bool>(
    l: L,
    job: &Matmul<'_>,
    (panel, columns): (usize, &[Column<F::Stored>]),
    row: usize,
) -> usize {
    let k = columns.len();
    let mut acc: Tile<L::F, M> = [[l.splat(0.0); 2]; M];
    let input = job.input.floats.as_ptr().wrapping_add(row * k);
    for (i, column) in columns.iter().enumerate() {
        if STREAMS {
            let ahead = std::ptr::from_ref(column).cast::<u8>().wrapping_add(STREAM_AHEAD_BYTES);
            l.prefetch(ahead);
            if F::IS_WIDE {
                l.prefetch(ahead.wrapping_add(64));
            }
        }
        let w = [F::load(l, &column[0]), F::load(l, &column[1])];
        for m in 0..M {
            // SAFETY: rows are in bounds by the caller's promise, and nobody writes them.
            let x = l.splat(unsafe { *input.add(m * k + i) });
            acc[m][0] = l.fma(w[0], x, acc[m][0]);
            acc[m][1] = l.fma(w[1], x, acc[m][1]);
        }
    }
    // A copy, so that the sums themselves stay in registers.
    let mut tile: Tile<L::F, M> = [[l.splat(0.0); 2]; M];
    for m in 0..M {
        tile[m] = [acc[m][0], acc[m][1]];
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<L, M>(l, job, panel, row, &tile) };
    M
}
