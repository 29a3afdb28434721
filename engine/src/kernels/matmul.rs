//! `out[M,N] = x[M,K] · w[N,K]ᵀ` over panels of 32 interleaved rows of `w` (see `weights`).
//!
//! A lane is an output row, so that nothing is summed across lanes. Along K there is one chain
//! of fused multiply-adds for each output, block after block, whatever M is: with bytes, a
//! block's dot is an exact integer first, then `acc = dot * (dw * da) + acc`.

mod bytes;
mod floats;
mod supers;
mod tiles;
mod unpack;

use std::ops::Range;

use baton_types::Activation;

use super::numerics::{gelu_mul, silu_mul};
use super::quantize::QuantView;
use crate::memory::Parts;
use crate::simd::{LANES, Lanes};
use crate::weights::{PackedMatrix, WeightFormat};
pub(crate) use tiles::PanelBlock;

/// How far ahead weights are asked for when they stream past once.
pub(super) const STREAM_AHEAD_BYTES: usize = 8192;

/// Blocks of scratch that hold a panel of `k` columns, unpacked as bytes or widened to `f32`, which
/// needs more.
pub(crate) fn scratch_blocks(k: usize) -> usize {
    (k * size_of::<floats::Column<f32>>()).div_ceil(size_of::<PanelBlock>())
}

/// What becomes of a panel's 32 results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Epilogue {
    Store,
    /// Added to what is there: the residual stream.
    Add,
    /// The first half is the gate, the second what it lets through: 16 outputs a panel.
    Gate(Activation),
    /// The gate is what is there, the results are what it lets through.
    GateOnto(Activation),
}

impl Epilogue {
    /// Outputs of a panel.
    #[inline(always)]
    fn width(self) -> usize {
        match self {
            Self::Store | Self::Add | Self::GateOnto(_) => 2 * LANES,
            Self::Gate(_) => LANES,
        }
    }
}

/// Rows of activations in both forms; a matrix reads the one that its format needs.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    /// `[row][k]`
    pub(crate) floats: Parts<'a, f32>,
    pub(crate) quants: QuantView<'a>,
}

/// One product, or a part of its panels.
pub(crate) struct Matmul<'a> {
    pub(crate) weights: &'a PackedMatrix,
    pub(crate) input: Input<'a>,
    pub(crate) rows: usize,
    pub(crate) panels: Range<usize>,
    /// `[row][stride]`
    pub(crate) out: Parts<'a, f32>,
    pub(crate) stride: usize,
    /// Column of the first panel's first output.
    pub(crate) column: usize,
    pub(crate) epilogue: Epilogue,
    /// This thread's room for an unpacked panel: [`scratch_blocks`].
    pub(crate) scratch: Parts<'a, PanelBlock>,
}

/// Results of one panel for `M` rows: its lower and its upper 16 outputs.
type Tile<F, const M: usize> = [[F; 2]; M];

/// Computes `job.panels` for all rows.
///
/// # Safety
/// Nobody else touches the output columns of these panels, nor writes the input, until the next
/// barrier.
#[inline(always)]
pub(crate) unsafe fn matmul<L: Lanes>(l: L, job: &Matmul<'_>) {
    let width = job.epilogue.width();
    let k = job.weights.k();
    assert!(job.input.quants.k == k && job.rows * k <= job.input.floats.len());
    assert!(job.rows <= job.input.quants.rows() && scratch_blocks(k) <= job.scratch.len());
    assert!(job.column + job.weights.panels() * width <= job.stride);
    assert!(job.rows * job.stride <= job.out.len() && job.panels.end <= job.weights.panels());
    // SAFETY: the assertions keep inputs and outputs in bounds; the rest is the caller's promise.
    unsafe {
        match job.weights.format() {
            WeightFormat::Q4_0 => panels::<L, tiles::Products<bytes::Q4_0>>(l, job),
            WeightFormat::Q4_1 => panels::<L, tiles::Products<bytes::Q4_1>>(l, job),
            WeightFormat::Q5_0 => panels::<L, tiles::Products<bytes::Q5_0>>(l, job),
            WeightFormat::Q5_1 => panels::<L, tiles::Products<bytes::Q5_1>>(l, job),
            WeightFormat::Q8_0 => panels::<L, tiles::Products<bytes::Q8_0>>(l, job),
            WeightFormat::Iq4Nl => panels::<L, tiles::Products<bytes::Iq4Nl>>(l, job),
            WeightFormat::Q2K => panels::<L, tiles::Products<supers::Q2K>>(l, job),
            WeightFormat::Q3K => panels::<L, tiles::Products<supers::Q3K>>(l, job),
            WeightFormat::Q4K => panels::<L, tiles::Products<supers::Q4K>>(l, job),
            WeightFormat::Q5K => panels::<L, tiles::Products<supers::Q5K>>(l, job),
            WeightFormat::Q6K => panels::<L, tiles::Products<supers::Q6K>>(l, job),
            WeightFormat::F16 => panels::<L, floats::Products<floats::F16>>(l, job),
            WeightFormat::Bf16 => panels::<L, floats::Products<floats::Bf16>>(l, job),
            WeightFormat::F32 => panels::<L, floats::Products<floats::F32>>(l, job),
        }
    }
}

/// How the formats of one kind compute.
trait PanelRows {
    /// Computes row `row` of panel `panel`.
    ///
    /// # Safety
    /// As [`matmul`], for this row.
    unsafe fn row<L: Lanes>(l: L, job: &Matmul<'_>, panel: usize, row: usize);

    /// Computes all panels of the job for several rows at once.
    ///
    /// # Safety
    /// As [`matmul`].
    unsafe fn tiles<L: Lanes>(l: L, job: &Matmul<'_>);
}

/// All panels of the job.
///
/// # Safety
/// As [`matmul`], which has checked the bounds.
#[inline(always)]
unsafe fn panels<L: Lanes, P: PanelRows>(l: L, job: &Matmul<'_>) {
    // SAFETY: rows stay below `job.rows`; the rest is the caller's promise.
    unsafe {
        if L::TILES && job.rows > 1 {
            return P::tiles::<L>(l, job);
        }
        for panel in job.panels.clone() {
            for row in 0..job.rows {
                P::row::<L>(l, job, panel, row);
            }
        }
    }
}

/// The 16 half-precision numbers of one half, as bits.
#[inline(always)]
fn half_floats(bytes: &[u8], half: usize) -> &[u16; LANES] {
    let bytes = &bytes.as_chunks::<32>().0[half];
    // SAFETY: 32 bytes are 16 numbers; panels are aligned to 64 bytes and blocks are a multiple
    // of 64 long, so that they are aligned as well. Every bit pattern is a number.
    unsafe { &*bytes.as_ptr().cast::<[u16; LANES]>() }
}

/// Writes the tile of `M` rows from `row` of panel `panel`.
///
/// # Safety
/// As [`matmul`], for rows `row..row + M`.
#[inline(always)]
unsafe fn finish<L: Lanes, const M: usize>(
    l: L,
    job: &Matmul<'_>,
    panel: usize,
    row: usize,
    tile: &Tile<L::F, M>,
) {
    let width = job.epilogue.width();
    for (m, halves) in tile.iter().enumerate() {
        let start = (row + m) * job.stride + job.column + panel * width;
        // SAFETY: in bounds as `matmul` asserted, and this thread's own by its caller's promise.
        let out = unsafe { std::slice::from_raw_parts_mut(job.out.as_ptr().add(start), width) };
        let (first, rest) = out.as_chunks_mut::<LANES>().0.split_at_mut(1);
        match job.epilogue {
            Epilogue::Store => {
                l.store(halves[0], &mut first[0]);
                l.store(halves[1], &mut rest[0]);
            }
            Epilogue::Add => {
                l.store(l.add(l.load(&first[0]), halves[0]), &mut first[0]);
                l.store(l.add(l.load(&rest[0]), halves[1]), &mut rest[0]);
            }
            Epilogue::Gate(by) => l.store(gated(l, by, halves[0], halves[1]), &mut first[0]),
            Epilogue::GateOnto(by) => {
                l.store(gated(l, by, l.load(&first[0]), halves[0]), &mut first[0]);
                l.store(gated(l, by, l.load(&rest[0]), halves[1]), &mut rest[0]);
            }
        }
    }
}

/// `activation(gate) * up`
#[inline(always)]
fn gated<L: Lanes>(l: L, activation: Activation, gate: L::F, up: L::F) -> L::F {
    match activation {
        Activation::Silu => silu_mul(l, gate, up),
        Activation::GeluTanh => gelu_mul(l, gate, up),
    }
}
