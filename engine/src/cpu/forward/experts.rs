//! A mixture of experts: each row goes through the few experts that its router picks.

use std::ops::Range;

use baton_types::Experts;

use super::super::CpuBackend;
use super::super::batch::Batch;
use super::branch_end;
use super::stages::{Product, multiply, multiply_all, quantize};
use crate::kernels::dispatch::Kernels;
use crate::kernels::experts::{Pick, Routes, combine, pick};
use crate::kernels::matmul::{Epilogue, Input, PanelBlock};
use crate::kernels::quantize::QuantView;
use crate::memory::Parts;
use crate::pool::{Pool, share};
use crate::weights::{FeedForward, PANEL_ROWS, PackedMatrix};

impl CpuBackend {
    /// `residual += Σ weight * expert(x)` over the experts that a row takes, with `x = normed`;
    /// the sum ends in `normed` where a norm follows.
    pub(super) fn mix_experts(&mut self, batch: &Batch<'_>, layer: usize) {
        self.route(batch, layer);
        let Self { model, weights, kernels, pool, cost, buffers, .. } = self;
        let (spec, rows) = (model.spec(), batch.rows.len());
        let post_norm = weights.layers[layer].post_ffn_norm.as_deref();
        let FeedForward::Experts { experts, .. } = &weights.layers[layer].ffn else {
            unreachable!("`feed_forward` has looked")
        };
        let (residual, normed) = (buffers.residual.parts(), buffers.normed.parts());
        let (gated, scratch) = (buffers.gated.parts(), buffers.unpacked.parts());
        let slots = buffers.experts.slots.as_mut().expect("a mixture has slots").parts();
        let routes = &buffers.experts.routes;
        let slot_count = routes.rows.len();
        let quants = buffers.quants.view(slot_count, spec.hidden);
        gather(pool, kernels, routes, normed, slots, quants);
        // Every part of the first product, then of the second where gate and up are apart.
        let parts = || routes.experts.iter().map(|(expert, slots)| (&experts[*expert], slots));
        for nth in 0..2 {
            let jobs = parts().filter_map(|(mlp, range)| {
                let product = mlp.gate_up.products(spec.features.activation).nth(nth);
                let (weights, epilogue) = product?;
                let io = ExpertIo { from: slots, quants, out: gated, stride: spec.ffn, scratch };
                Some(io.product(weights, range, epilogue))
            });
            multiply_all(pool, kernels, cost, &jobs.collect::<Vec<_>>());
        }
        let quants = quants.of_width(spec.ffn);
        if let Some((first, _)) = routes.experts.first() {
            quantize(pool, kernels, gated, &experts[*first].down, slot_count, quants);
        }
        let jobs = parts().map(|(mlp, range)| {
            let stride = spec.hidden;
            let io = ExpertIo { from: gated, quants, out: slots, stride, scratch };
            io.product(&mlp.down, range, Epilogue::Store)
        });
        multiply_all(pool, kernels, cost, &jobs.collect::<Vec<_>>());
        let (out, epilogue) = branch_end(post_norm, residual, normed);
        let picks = &buffers.experts.picks;
        let used = slot_count / rows.max(1);
        let sums = Sums { routes, picks, used, slots, out, hidden: spec.hidden, rows };
        sums.add(pool, epilogue == Epilogue::Add);
    }

    /// Picks the experts of each row and lays out their slots.
    fn route(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, cost, buffers, .. } = self;
        let (spec, rows) = (model.spec(), batch.rows.len());
        let FeedForward::Experts { router, .. } = &weights.layers[layer].ffn else {
            unreachable!("`feed_forward` has looked")
        };
        let Experts { count, used, normalize_weights } =
            spec.features.experts.expect("a mixture has experts");
        let quants = buffers.quants.view(rows, spec.hidden);
        let scores = buffers.experts.scores.as_mut().expect("a mixture has scores").parts();
        let stride = router.panels() * PANEL_ROWS;
        let product = Product {
            weights: router,
            input: Input { floats: buffers.normed.parts(), quants },
            rows,
            out: scores,
            stride,
            column: 0,
            epilogue: Epilogue::Store,
            scratch: buffers.unpacked.parts(),
        };
        multiply(pool, kernels, cost, &product);
        let picks = Parts::new(&mut buffers.experts.picks);
        let threads = pool.threads();
        pool.run_rows(rows, &|thread| {
            for row in share(rows, threads, thread) {
                // SAFETY: each row belongs to one thread, and scores are only read.
                unsafe {
                    let scores = scores.of(row * stride..row * stride + count);
                    pick(scores, normalize_weights, picks.of_mut(row * used..(row + 1) * used));
                }
            }
        });
        buffers.experts.routes.plan(&buffers.experts.picks[..rows * used], used, count);
    }
}

/// The slots of all experts, before and after one product.
#[derive(Clone, Copy)]
struct ExpertIo<'a> {
    /// `[slot][k]`
    from: Parts<'a, f32>,
    /// The same, quantised.
    quants: QuantView<'a>,
    /// `[slot][stride]`
    out: Parts<'a, f32>,
    stride: usize,
    scratch: Parts<'a, PanelBlock>,
}

impl<'a> ExpertIo<'a> {
    /// One expert's product, over its slots.
    fn product(
        &self,
        weights: &'a PackedMatrix,
        slots: &Range<usize>,
        epilogue: Epilogue,
    ) -> Product<'a> {
        let floats = self.from.skip(slots.start * weights.k());
        let input = Input { floats, quants: self.quants.skip(slots.start) };
        let out = self.out.skip(slots.start * self.stride);
        let (rows, stride, scratch) = (slots.len(), self.stride, self.scratch);
        Product { weights, input, rows, out, stride, column: 0, epilogue, scratch }
    }
}

/// `slots[slot] = normed[its row]`, also quantised.
fn gather(
    pool: &mut Pool,
    kernels: &Kernels,
    routes: &Routes,
    normed: Parts<'_, f32>,
    slots: Parts<'_, f32>,
    quants: QuantView<'_>,
) {
    let (hidden, threads) = (quants.k, pool.threads());
    pool.run_rows(routes.rows.len(), &|thread| {
        for slot in share(routes.rows.len(), threads, thread) {
            let row = routes.rows[slot];
            // SAFETY: each slot belongs to one thread, and `normed` is only read.
            unsafe {
                let from = normed.of(row * hidden..(row + 1) * hidden);
                slots.of_mut(slot * hidden..(slot + 1) * hidden).copy_from_slice(from);
                (kernels.quantize)(from, &quants, slot);
            }
        }
    });
}

/// The experts' outputs, to be summed for each row.
struct Sums<'a> {
    routes: &'a Routes,
    picks: &'a [Pick],
    used: usize,
    /// `[slot][hidden]`
    slots: Parts<'a, f32>,
    /// `[row][hidden]`
    out: Parts<'a, f32>,
    hidden: usize,
    rows: usize,
}

impl Sums<'_> {
    /// `out[row] = Σ weight * slot`, or `out[row] += Σ weight * slot`.
    fn add(&self, pool: &mut Pool, is_added: bool) {
        let (hidden, used, threads) = (self.hidden, self.used, pool.threads());
        pool.run_rows(self.rows, &|thread| {
            let mut sum = vec![0.0; hidden];
            for row in share(self.rows, threads, thread) {
                let picks = row * used..(row + 1) * used;
                let slots = picks.map(|i| {
                    let slot = self.routes.slots[i];
                    // SAFETY: slots are only read in this stage.
                    let values = unsafe { self.slots.of(slot * hidden..(slot + 1) * hidden) };
                    (self.picks[i].weight, values)
                });
                combine(slots, &mut sum);
                // SAFETY: each row belongs to one thread.
                let out = unsafe { self.out.of_mut(row * hidden..(row + 1) * hidden) };
                if is_added {
                    out.iter_mut().zip(&sum).for_each(|(out, sum)| *out += sum);
                } else {
                    out.copy_from_slice(&sum);
                }
            }
        });
    }
}
