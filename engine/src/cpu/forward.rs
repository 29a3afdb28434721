//! The forward pass, stage by stage. A stage is one `Pool::run`: its end is a barrier.

mod attend;
mod stages;

use baton_model_files::TensorRole;

use super::CpuBackend;
use super::batch::Batch;
use crate::backend::LayerSink;
use crate::kernels::matmul::{Epilogue, Input};
use crate::pool::share;
use crate::weights::widen_row;
use stages::{Normalization, Product, multiply, normalize, quantize};

impl CpuBackend {
    /// Runs `batch` through all layers; returns `logits[logit rows][vocab]`.
    pub(super) fn forward(&mut self, batch: &Batch<'_>, sink: &mut dyn LayerSink) -> &[f32] {
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

    /// `residual[row] = embedding[token]`
    fn embed(&mut self, batch: &Batch<'_>) {
        let Self { model, pool, buffers, .. } = self;
        let embedding = model.tensor(TensorRole::Embedding);
        let hidden = embedding.cols;
        let residual = buffers.residual.parts();
        let threads = pool.threads();
        pool.run(&|thread| {
            for row in share(batch.rows.len(), threads, thread) {
                // SAFETY: each row belongs to one thread.
                let out = unsafe { residual.of_mut(row * hidden..(row + 1) * hidden) };
                widen_row(&embedding, batch.rows[row].token as usize, out);
            }
        });
    }

    /// `qkv = norm(residual) · Wqkvᵀ`
    fn project_qkv(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, buffers, .. } = self;
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
        let qkv = buffers.qkv.parts();
        for projection in &weights.qkv {
            multiply(
                pool,
                kernels,
                &Product {
                    weights: &projection.matrix,
                    input: Input { floats: normed, quants },
                    rows,
                    out: qkv,
                    stride: weights.columns.stride,
                    column: projection.column,
                    epilogue: Epilogue::Store,
                },
            );
        }
    }

    /// `residual += attended · Woᵀ`
    fn project_attended(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, buffers, .. } = self;
        let spec = model.spec();
        let weights = &weights.layers[layer].attn_out;
        let rows = batch.rows.len();
        let quants = buffers.quants.view(rows, weights.k());
        let attended = buffers.attended.parts();
        quantize(pool, kernels, attended, weights, rows, quants);
        multiply(
            pool,
            kernels,
            &Product {
                weights,
                input: Input { floats: attended, quants },
                rows,
                out: buffers.residual.parts(),
                stride: spec.hidden,
                column: 0,
                epilogue: Epilogue::Add,
            },
        );
    }

    /// `residual += (silu(x · Wgateᵀ) * (x · Wupᵀ)) · Wdownᵀ` with `x = norm(residual)`
    fn feed_forward(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, buffers, .. } = self;
        let spec = model.spec();
        let weights = &weights.layers[layer];
        let rows = batch.rows.len();
        let (residual, normed) = (buffers.residual.parts(), buffers.normed.parts());
        let gated = buffers.gated.parts();
        let quants = buffers.quants.view(rows, spec.hidden);
        let job = Normalization {
            x: residual,
            from: None,
            weight: &weights.ffn_norm,
            eps: spec.norm_eps,
            normed,
            quants,
            rows,
        };
        normalize(pool, kernels, &job);
        for (weights, epilogue) in weights.gate_up.products() {
            multiply(
                pool,
                kernels,
                &Product {
                    weights,
                    input: Input { floats: normed, quants },
                    rows,
                    out: gated,
                    stride: spec.ffn,
                    column: 0,
                    epilogue,
                },
            );
        }
        let quants = buffers.quants.view(rows, spec.ffn);
        quantize(pool, kernels, gated, &weights.down, rows, quants);
        multiply(
            pool,
            kernels,
            &Product {
                weights: &weights.down,
                input: Input { floats: gated, quants },
                rows,
                out: residual,
                stride: spec.hidden,
                column: 0,
                epilogue: Epilogue::Add,
            },
        );
    }

    /// `logits = norm(residual) · Woutᵀ` for the rows that need them.
    fn compute_logits(&mut self, batch: &Batch<'_>) -> &[f32] {
        let Self { model, weights, kernels, pool, buffers, .. } = self;
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
            &Product {
                weights: &weights.output,
                input: Input { floats: normed, quants },
                rows,
                out: buffers.logits.parts(),
                stride,
                column: 0,
                epilogue: Epilogue::Store,
            },
        );
        // Panels pad the vocabulary; rows move together.
        for row in 1..rows * usize::from(stride != spec.vocab) {
            buffers.logits.copy_within(row * stride..row * stride + spec.vocab, row * spec.vocab);
        }
        &buffers.logits[..rows * spec.vocab]
    }
}
