//! Products of floating-point weights with `f32` activations: one fused chain along K.

use super::{Matmul, Tile, finish};
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
                tile::<L, F, 8>(l, job, panel, row);
                row += 8;
            }
            while L::TILES && row + 4 <= job.rows {
                tile::<L, F, 4>(l, job, panel, row);
                row += 4;
            }
            if L::TILES && row + 2 <= job.rows {
                tile::<L, F, 2>(l, job, panel, row);
                row += 2;
            }
            while row < job.rows {
                tile::<L, F, 1>(l, job, panel, row);
                row += 1;
            }
        }
    }
}

/// # Safety
/// As `matmul`, for rows `row..row + M`.
#[inline(always)]
unsafe fn tile<L: Lanes, F: Format, const M: usize>(
    l: L,
    job: &Matmul<'_>,
    panel: usize,
    row: usize,
) {
    let k = job.weights.k();
    let mut acc: Tile<L::F, M> = [[l.splat(0.0); 2]; M];
    let weights = job.weights.panel(panel).as_ptr().cast::<[[F::Stored; LANES]; 2]>();
    let input = job.input.floats.as_ptr().wrapping_add(row * k);
    for i in 0..k {
        // SAFETY: a panel holds `k` columns of 32 elements, aligned to 64 bytes.
        let column = unsafe { &*weights.add(i) };
        let w = [F::load(l, &column[0]), F::load(l, &column[1])];
        for m in 0..M {
            // SAFETY: rows are in bounds by the caller's promise, and nobody writes them.
            let x = l.splat(unsafe { *input.add(m * k + i) });
            acc[m][0] = l.fma(w[0], x, acc[m][0]);
            acc[m][1] = l.fma(w[1], x, acc[m][1]);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<L, M>(l, job, panel, row, &acc) }
}
