//! Memory of a step, reserved once.

use baton_types::ModelSpec;

use super::CpuConfig;
use super::batch::TILE_ROWS;
use crate::kernels::attention::{CHUNK_TOKENS, Partial};
use crate::kernels::experts::{Pick, Routes};
use crate::kernels::matmul::{PanelBlock, scratch_blocks};
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
    /// `[row or slot][ffn]`
    pub(super) gated: Buffer<f32>,
    /// The input of the product at hand, quantised.
    pub(super) quants: QuantRows,
    /// Room for an unpacked panel for each thread.
    pub(super) unpacked: Buffer<PanelBlock>,
    /// `[logit row][vocab, padded to a panel]`
    pub(super) logits: Buffer<f32>,
    /// Empty but for a mixture of experts.
    pub(super) experts: ExpertBuffers,
    /// One for each thread.
    pub(super) attention: Vec<AttentionScratch>,
    /// Results of single chunks, where attention is split by chunks.
    pub(super) partials: Vec<Partial>,
}

/// What a mixture of experts needs. A slot is a row at one of the experts that it takes; slots
/// of one expert are neighbours.
#[derive(Default)]
pub(super) struct ExpertBuffers {
    /// `[row][experts, padded to a panel]`: the router's outputs.
    pub(super) scores: Option<Buffer<f32>>,
    /// `[slot][hidden]`: inputs of experts, then their outputs.
    pub(super) slots: Option<Buffer<f32>>,
    /// `[row][used]`
    pub(super) picks: Vec<Pick>,
    pub(super) routes: Routes,
}

/// What one thread needs to attend.
pub(super) struct AttentionScratch {
    /// `[query row][head_dim]`
    pub(super) queries: Vec<f32>,
    /// The same, where sinks see them from another place.
    pub(super) sink_queries: Vec<f32>,
    /// `[query row][head_dim]`, where the pages want queries as bytes.
    pub(super) quants: Vec<i8>,
    /// `[query row][256]`
    pub(super) scores: Vec<f32>,
    pub(super) from: Vec<u32>,
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
        // Slots of a row: one where there are no experts.
        let slots = spec.features.experts.map_or(1, |experts| experts.used);
        let widest = query_width.max(slots * spec.hidden.max(spec.ffn));
        let columns = query_width.max(spec.hidden).max(spec.ffn);
        let tile_rows = TILE_ROWS.max(spec.heads / spec.kv_heads);
        let scratch = || AttentionScratch {
            queries: vec![0.0; tile_rows * spec.head_dim],
            sink_queries: vec![0.0; tile_rows * spec.head_dim],
            quants: vec![0; tile_rows * spec.head_dim],
            scores: vec![0.0; tile_rows * CHUNK_TOKENS],
            from: Vec::with_capacity(tile_rows),
            visible: Vec::with_capacity(tile_rows),
            chunk: Partial::new(tile_rows, spec.head_dim),
            state: Partial::new(tile_rows, spec.head_dim),
        };
        Ok(Self {
            residual: Buffer::zeroed(rows * spec.hidden)?,
            normed: Buffer::zeroed(rows * spec.hidden)?,
            qkv: Buffer::zeroed(rows * weights.qkv_stride())?,
            attended: Buffer::zeroed(rows * query_width)?,
            gated: Buffer::zeroed(rows * slots * spec.ffn)?,
            quants: QuantRows::new(rows, widest)?,
            unpacked: Buffer::zeroed(config.threads * scratch_blocks(columns))?,
            logits: Buffer::zeroed(
                config.max_logit_rows * spec.vocab.next_multiple_of(PANEL_ROWS),
            )?,
            experts: ExpertBuffers::new(spec, rows)?,
            attention: (0..config.threads).map(|_| scratch()).collect(),
            partials: Vec::new(),
        })
    }
}

impl ExpertBuffers {
    fn new(spec: &ModelSpec, rows: usize) -> std::io::Result<Self> {
        let Some(experts) = spec.features.experts else { return Ok(Self::default()) };
        let scores = Buffer::zeroed(rows * experts.count.next_multiple_of(PANEL_ROWS))?;
        Ok(Self {
            scores: Some(scores),
            slots: Some(Buffer::zeroed(rows * experts.used * spec.hidden)?),
            picks: vec![Pick::default(); rows * experts.used],
            routes: Routes::default(),
        })
    }
}
