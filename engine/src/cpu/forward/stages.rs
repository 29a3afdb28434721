//! Stages that every layer is made of.

use crate::backend::StepCost;
use crate::kernels::dispatch::{Kernels, Norm};
use crate::kernels::matmul::{Epilogue, Input, Matmul, PanelBlock};
use crate::kernels::quantize::QuantView;
use crate::memory::Parts;
use crate::pool::{Pieces, Pool, share};
use crate::weights::{PANEL_ROWS, PackedMatrix};

/// Pieces into which a product's panels are cut for each thread, once a panel takes long enough for
/// threads to drift apart. Before that each has one, which it reads from end to end.
const PIECES: usize = 8;
/// From so many rows on a panel takes long.
const MANY_ROWS: usize = 16;

/// A whole product.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) weights: &'a PackedMatrix,
    pub(super) input: Input<'a>,
    pub(super) rows: usize,
    pub(super) out: Parts<'a, f32>,
    pub(super) stride: usize,
    pub(super) column: usize,
    pub(super) epilogue: Epilogue,
    /// Room for an unpacked panel for each thread.
    pub(super) scratch: Parts<'a, PanelBlock>,
}

/// Rows to normalise and quantise.
pub(super) struct Normalization<'a> {
    pub(super) x: Parts<'a, f32>,
    /// Row `i` comes from row `from[i]` of `x`, or from row `i`.
    pub(super) from: Option<&'a [usize]>,
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
    /// `[rows][hidden]`
    pub(super) normed: Parts<'a, f32>,
    pub(super) quants: QuantView<'a>,
    pub(super) rows: usize,
}

/// `normed = rms_norm(x)`, also quantised.
pub(super) fn normalize(pool: &mut Pool, kernels: &Kernels, job: &Normalization<'_>) {
    let (weight, eps, hidden) = (job.weight, job.eps, job.weight.len());
    let threads = pool.threads();
    pool.run_rows(job.rows, &|thread| {
        for row in share(job.rows, threads, thread) {
            let source = job.from.map_or(row, |from| from[row]);
            // SAFETY: each row belongs to one thread, `x` is only read, and the kernels' needs
            // of lengths are theirs to check.
            unsafe {
                let x = job.x.of(source * hidden..(source + 1) * hidden);
                let out = job.normed.of_mut(row * hidden..(row + 1) * hidden);
                (kernels.norm)(&mut Norm { x, weight, eps, out });
                let normed = job.normed.of(row * hidden..(row + 1) * hidden);
                (kernels.quantize)(normed, &job.quants, row);
            }
        }
    });
}

/// Quantises rows `x[rows][k]` where `weights` want it.
pub(super) fn quantize(
    pool: &mut Pool,
    kernels: &Kernels,
    x: Parts<'_, f32>,
    weights: &PackedMatrix,
    rows: usize,
    quants: QuantView<'_>,
) {
    if !weights.format().is_quantized() {
        return;
    }
    let (k, threads) = (quants.k, pool.threads());
    pool.run_rows(rows, &|thread| {
        for row in share(rows, threads, thread) {
            // SAFETY: each row belongs to one thread, and `x` is only read.
            unsafe { (kernels.quantize)(x.of(row * k..(row + 1) * k), &quants, row) }
        }
    });
}

/// `out[rows][K] += rms_norm(x)`, `weight[K]`.
pub(super) fn add_normalized(
    pool: &mut Pool,
    kernels: &Kernels,
    x: Parts<'_, f32>,
    (weight, eps): (&[f32], f32),
    out: Parts<'_, f32>,
    rows: usize,
) {
    let (width, threads) = (weight.len(), pool.threads());
    pool.run_rows(rows, &|thread| {
        for row in share(rows, threads, thread) {
            // SAFETY: each row belongs to one thread, and `x` is only read.
            unsafe {
                let x = x.of(row * width..(row + 1) * width);
                let out = out.of_mut(row * width..(row + 1) * width);
                (kernels.add_norm)(&mut Norm { x, weight, eps, out });
            }
        }
    });
}

/// `out = input · weightsᵀ`, panels shared out to the threads.
pub(super) fn multiply(
    pool: &mut Pool,
    kernels: &Kernels,
    cost: &mut StepCost,
    product: &Product<'_>,
) {
    multiply_all(pool, kernels, cost, std::slice::from_ref(product));
}

/// Products of matrices of one shape, whose outputs do not overlap, in one stage.
pub(super) fn multiply_all(
    pool: &mut Pool,
    kernels: &Kernels,
    cost: &mut StepCost,
    products: &[Product<'_>],
) {
    let Some(first) = products.first() else { return };
    for product in products {
        let rows = product.weights.panels() * PANEL_ROWS;
        let flops = 2 * (product.rows * rows * product.weights.k()) as u64;
        cost.flops += flops;
        if product.weights.format().is_quantized() {
            cost.dot_ops += flops;
        }
        cost.weight_bytes += product.weights.bytes() as u64;
    }
    let panels = first.weights.panels();
    let threads = pool.threads();
    let per_thread = if first.rows < MANY_ROWS { 1 } else { PIECES };
    let piece = if threads == 1 { panels } else { panels.div_ceil(threads * per_thread) };
    let cuts = panels.div_ceil(piece);
    let pieces = Pieces::new(products.len() * cuts, 1);
    pool.run(&|thread| {
        while let Some(taken) = pieces.take() {
            let (product, start) = (&products[taken.start / cuts], taken.start % cuts * piece);
            let job = Matmul {
                weights: product.weights,
                input: product.input,
                rows: product.rows,
                panels: start..(start + piece).min(panels),
                out: product.out,
                stride: product.stride,
                column: product.column,
                epilogue: product.epilogue,
                scratch: product.scratch.share(threads, thread),
            };
            // SAFETY: each piece's columns belong to the thread that took it, and the input is
            // only read in this stage.
            unsafe { (kernels.matmul)(&job) }
        }
    });
}
