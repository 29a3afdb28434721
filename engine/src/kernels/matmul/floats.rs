//! Products of floating-point weights with `f32` activations: one fused chain along K.

use std::marker::PhantomData;

use super::{Matmul, PanelRows, STREAM_AHEAD_BYTES, Tile, finish};
use crate::simd::{LANES, Lanes};

/// A floating-point format; a panel is `[k][32 rows]`.
pub(super) trait Format {
    type Stored: Copy;

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
        unsafe { tile::<L, F, 1>(l, job, panel, row) };
    }

    /// Rows in tiles of 12, 8, 4, 2, 1.
    #[inline(always)]
    unsafe fn tiles<L: Lanes>(l: L, job: &Matmul<'_>) {
        for panel in job.panels.clone() {
            let mut row = 0;
            while row < job.rows {
                // SAFETY: rows stay below `job.rows`; the rest is the caller's promise.
                row += unsafe {
                    match job.rows - row {
                        12.. if L::MANY_REGISTERS => tile::<L, F, 12>(l, job, panel, row),
                        8.. if L::MANY_REGISTERS => tile::<L, F, 8>(l, job, panel, row),
                        4.. => tile::<L, F, 4>(l, job, panel, row),
                        2.. => tile::<L, F, 2>(l, job, panel, row),
                        _ => tile::<L, F, 1>(l, job, panel, row),
                    }
                };
            }
        }
    }
}

/// Computes rows `row..row + M` of panel `panel`; returns `M`.
///
/// # Safety
/// As `matmul`, for these rows.
#[inline(always)]
unsafe fn tile<L: Lanes, F: Format, const M: usize>(
    l: L,
    job: &Matmul<'_>,
    panel: usize,
    row: usize,
) -> usize {
    let k = job.weights.k();
    let mut acc: Tile<L::F, M> = [[l.splat(0.0); 2]; M];
    let weights = job.weights.panel(panel).as_ptr().cast::<[[F::Stored; LANES]; 2]>();
    let input = job.input.floats.as_ptr().wrapping_add(row * k);
    for i in 0..k {
        let column = weights.wrapping_add(i);
        if row == 0 {
            for line in (0..size_of::<[[F::Stored; LANES]; 2]>()).step_by(64) {
                l.prefetch(column.cast::<u8>().wrapping_add(STREAM_AHEAD_BYTES + line));
            }
        }
        // SAFETY: a panel holds `k` columns of 32 elements, aligned to 64 bytes.
        let column = unsafe { &*column };
        let w = [F::load(l, &column[0]), F::load(l, &column[1])];
        for m in 0..M {
            // SAFETY: rows are in bounds by the caller's promise, and nobody writes them.
            let x = l.splat(unsafe { *input.add(m * k + i) });
            acc[m][0] = l.fma(w[0], x, acc[m][0]);
            acc[m][1] = l.fma(w[1], x, acc[m][1]);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<L, M>(l, job, panel, row, &acc) };
    M
}
