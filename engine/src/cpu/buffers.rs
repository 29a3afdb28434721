//! Memory of a step, reserved once.

use baton_types::ModelSpec;

use super::CpuConfig;
use super::batch::TILE_ROWS;
use crate::kernels::attention::{CHUNK_TOKENS, Partial};
use crate::kernels::quantize::QuantRows;
use crate::memory::Buffer;
use crate::weights::{PANEL_ROWS, Weights};

/// Activations of all rows of a step.
pub(super) struct Buffers {
    /// `[row][hidden]`: the residual stream.
    pub(super) residual: Buffer<f32>,
    /// `[row][hidden]`
    pub(super) normed: Buffer<f32>,
    /// `[row][columns of Q, K, V]`
    pub(super) qkv: Buffer<f32>,
    /// `[row][heads * head_dim]`
    pub(super) attended: Buffer<f32>,
    /// `[row][ffn]`
    pub(super) gated: Buffer<f32>,
    /// The input of the product at hand, quantised.
    pub(super) quants: QuantRows,
    /// `[logit row][vocab, padded to a panel]`
    pub(super) logits: Buffer<f32>,
    /// One for each thread.
    pub(super) attention: Vec<AttentionScratch>,
    /// Results of single chunks, where attention is split by chunks.
    pub(super) partials: Vec<Partial>,
}

/// What one thread needs to attend.
pub(super) struct AttentionScratch {
    /// `[query row][head_dim]`
    pub(super) queries: Vec<f32>,
    /// `[query row][256]`
    pub(super) scores: Vec<f32>,
    pub(super) visible: Vec<u32>,
    pub(super) chunk: Partial,
    pub(super) state: Partial,
}

impl Buffers {
    /// # Errors
    /// When the system has no room.
    pub(super) fn new(
        spec: &ModelSpec,
        weights: &Weights,
        config: &CpuConfig,
    ) -> std::io::Result<Self> {
        let rows = config.max_step_tokens.max(config.max_logit_rows);
        let query_width = spec.heads * spec.head_dim;
        let widest = spec.hidden.max(query_width).max(spec.ffn);
        let tile_rows = TILE_ROWS.max(spec.heads / spec.kv_heads);
        let scratch = || AttentionScratch {
            queries: vec![0.0; tile_rows * spec.head_dim],
            scores: vec![0.0; tile_rows * CHUNK_TOKENS],
            visible: Vec::with_capacity(tile_rows),
            chunk: Partial::new(tile_rows, spec.head_dim),
            state: Partial::new(tile_rows, spec.head_dim),
        };
        Ok(Self {
            residual: Buffer::zeroed(rows * spec.hidden)?,
            normed: Buffer::zeroed(rows * spec.hidden)?,
            qkv: Buffer::zeroed(rows * weights.qkv_stride())?,
            attended: Buffer::zeroed(rows * query_width)?,
            gated: Buffer::zeroed(rows * spec.ffn)?,
            quants: QuantRows::new(rows, widest)?,
            logits: Buffer::zeroed(
                config.max_logit_rows * spec.vocab.next_multiple_of(PANEL_ROWS),
            )?,
            attention: (0..config.threads).map(|_| scratch()).collect(),
            partials: Vec::new(),
        })
    }
}
