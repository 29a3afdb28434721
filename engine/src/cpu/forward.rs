//! The forward pass, stage by stage. A stage is one `Pool::run`: its end is a barrier.

mod attend;
mod experts;
mod stages;

use baton_model_files::TensorRole;

use super::CpuBackend;
use super::batch::Batch;
use crate::backend::LayerSink;
use crate::kernels::matmul::{Epilogue, Input};
use crate::memory::Parts;
use crate::pool::share;
use crate::weights::{FeedForward, widen_row};
use stages::{Normalization, Product, add_normalized, multiply, normalize, quantize};

impl CpuBackend {
    /// Runs `batch` through all layers; returns `logits[logit rows][vocab]`.
    pub(super) fn forward(&mut self, batch: &Batch<'_>, sink: &mut dyn LayerSink) -> &[f32] {
        self.ropes.prepare(batch.rows.iter().map(|row| row.position));
        self.embed(batch);
        for layer in 0..self.weights.layers.len() {
            self.project_qkv(batch, layer);
            self.rotate_and_store(batch, layer);
            self.attend(batch, layer);
            self.project_attended(batch, layer);
            self.feed_forward(batch, layer);
            sink.layer_done(layer, &self.pages);
        }
        self.compute_logits(batch)
    }

    /// `residual[row] = embedding[token]`, scaled where the family does so.
    fn embed(&mut self, batch: &Batch<'_>) {
        let Self { model, pool, buffers, .. } = self;
        let embedding = model.tensor(TensorRole::Embedding);
        let hidden = embedding.cols;
        let scale = model.spec().features.embedding_scale;
        let residual = buffers.residual.parts();
        let threads = pool.threads();
        pool.run_rows(batch.rows.len(), &|thread| {
            for row in share(batch.rows.len(), threads, thread) {
                // SAFETY: each row belongs to one thread.
                let out = unsafe { residual.of_mut(row * hidden..(row + 1) * hidden) };
                widen_row(&embedding, batch.rows[row].token as usize, out);
                if let Some(scale) = scale {
                    out.iter_mut().for_each(|x| *x *= scale);
                }
            }
        });
    }

    /// `qkv = norm(residual) · Wqkvᵀ`
    fn project_qkv(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, cost, buffers, .. } = self;
        let spec = model.spec();
        let weights = &weights.layers[layer];
        let rows = batch.rows.len();
        let quants = buffers.quants.view(rows, spec.hidden);
        let (residual, normed) = (buffers.residual.parts(), buffers.normed.parts());
        let job = Normalization {
            x: residual,
            from: None,
            weight: &weights.attn_norm,
            eps: spec.norm_eps,
            normed,
            quants,
            rows,
        };
        normalize(pool, kernels, &job);
        let (qkv, scratch) = (buffers.qkv.parts(), buffers.unpacked.parts());
        for projection in &weights.qkv {
            multiply(
                pool,
                kernels,
                cost,
                &Product {
                    weights: &projection.matrix,
                    input: Input { floats: normed, quants },
                    rows,
                    out: qkv,
                    stride: weights.columns.stride,
                    column: projection.column,
                    epilogue: Epilogue::Store,
                    scratch,
                },
            );
        }
    }

    /// `residual += attended · Woᵀ`, the product normalised first where the family does so.
    fn project_attended(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, cost, buffers, .. } = self;
        let spec = model.spec();
        let post_norm = weights.layers[layer].post_attn_norm.as_deref();
        let weights = &weights.layers[layer].attn_out;
        let rows = batch.rows.len();
        let quants = buffers.quants.view(rows, weights.k());
        let attended = buffers.attended.parts();
        let (residual, normed) = (buffers.residual.parts(), buffers.normed.parts());
        quantize(pool, kernels, attended, weights, rows, quants);
        let (out, epilogue) = branch_end(post_norm, residual, normed);
        let input = Input { floats: attended, quants };
        let stride = spec.hidden;
        let scratch = buffers.unpacked.parts();
        let column = 0;
        let product = Product { weights, input, rows, out, stride, column, epilogue, scratch };
        multiply(pool, kernels, cost, &product);
        if let Some(weight) = post_norm {
            add_normalized(pool, kernels, normed, (weight, spec.norm_eps), residual, rows);
        }
    }

    /// `residual += ffn(norm(residual))`, normalised once more where the family does so.
    fn feed_forward(&mut self, batch: &Batch<'_>, layer: usize) {
        self.normalize_for_ffn(batch, layer);
        match &self.weights.layers[layer].ffn {
            FeedForward::Dense(_) => self.dense_ffn(batch, layer),
            FeedForward::Experts { .. } => self.mix_experts(batch, layer),
        }
        let Self { model, weights, kernels, pool, buffers, .. } = self;
        if let Some(weight) = weights.layers[layer].post_ffn_norm.as_deref() {
            let (residual, normed) = (buffers.residual.parts(), buffers.normed.parts());
            let norm = (weight, model.spec().norm_eps);
            add_normalized(pool, kernels, normed, norm, residual, batch.rows.len());
        }
    }

    /// `normed = norm(residual)`, also quantised.
    fn normalize_for_ffn(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, buffers, .. } = self;
        let (spec, rows) = (model.spec(), batch.rows.len());
        let job = Normalization {
            x: buffers.residual.parts(),
            from: None,
            weight: &weights.layers[layer].ffn_norm,
            eps: spec.norm_eps,
            normed: buffers.normed.parts(),
            quants: buffers.quants.view(rows, spec.hidden),
            rows,
        };
        normalize(pool, kernels, &job);
    }

    /// `residual += (act(x · Wgateᵀ) * (x · Wupᵀ)) · Wdownᵀ` with `x = normed`; the sum's second
    /// half ends in `normed` where a norm follows.
    fn dense_ffn(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, cost, buffers, .. } = self;
        let (spec, rows) = (model.spec(), batch.rows.len());
        let post_norm = weights.layers[layer].post_ffn_norm.as_deref();
        let FeedForward::Dense(mlp) = &weights.layers[layer].ffn else {
            unreachable!("`feed_forward` has looked")
        };
        let (residual, normed) = (buffers.residual.parts(), buffers.normed.parts());
        let gated = buffers.gated.parts();
        let quants = buffers.quants.view(rows, spec.hidden);
        let input = Input { floats: normed, quants };
        let scratch = buffers.unpacked.parts();
        for (weights, epilogue) in mlp.gate_up.products(spec.features.activation) {
            let stride = spec.ffn;
            let (out, column) = (gated, 0);
            let product = Product { weights, input, rows, out, stride, column, epilogue, scratch };
            multiply(pool, kernels, cost, &product);
        }
        let quants = buffers.quants.view(rows, spec.ffn);
        quantize(pool, kernels, gated, &mlp.down, rows, quants);
        let (out, epilogue) = branch_end(post_norm, residual, normed);
        let down = Product {
            weights: &mlp.down,
            input: Input { floats: gated, quants },
            rows,
            out,
            stride: spec.hidden,
            column: 0,
            epilogue,
            scratch,
        };
        multiply(pool, kernels, cost, &down);
    }

    /// `logits = norm(residual) · Woutᵀ` for the rows that need them.
    fn compute_logits(&mut self, batch: &Batch<'_>) -> &[f32] {
        let Self { model, weights, kernels, pool, cost, buffers, .. } = self;
        let spec = model.spec();
        let rows = batch.logit_rows.len();
        if rows == 0 {
            return &[];
        }
        let quants = buffers.quants.view(rows, spec.hidden);
        let (residual, normed) = (buffers.residual.parts(), buffers.normed.parts());
        let job = Normalization {
            x: residual,
            from: Some(&batch.logit_rows),
            weight: &weights.final_norm,
            eps: spec.norm_eps,
            normed,
            quants,
            rows,
        };
        normalize(pool, kernels, &job);
        let stride = weights.output.panels() * crate::weights::PANEL_ROWS;
        multiply(
            pool,
            kernels,
            cost,
            &Product {
                weights: &weights.output,
                input: Input { floats: normed, quants },
                rows,
                out: buffers.logits.parts(),
                stride,
                column: 0,
                epilogue: Epilogue::Store,
                scratch: buffers.unpacked.parts(),
            },
        );
        // Panels pad the vocabulary; rows move together.
        for row in 1..rows * usize::from(stride != spec.vocab) {
            buffers.logits.copy_within(row * stride..row * stride + spec.vocab, row * spec.vocab);
        }
        &buffers.logits[..rows * spec.vocab]
    }
}

/// Where a branch's last product goes: onto the residual stream, or aside when a norm follows.
fn branch_end<'a>(
    post_norm: Option<&[f32]>,
    residual: Parts<'a, f32>,
    normed: Parts<'a, f32>,
) -> (Parts<'a, f32>, Epilogue) {
    match post_norm {
        None => (residual, Epilogue::Add),
        Some(_) => (normed, Epilogue::Store),
    }
}
