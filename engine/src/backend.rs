//! The seam between the engine's decisions and the hardware that computes.

use std::ops::Range;

use baton_types::{BlockId, KvLayout, ModelSpec, NumericsVersion, StreamingAttention, TokenId};

/// Which rows of a span need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// Prefill in the middle of a prompt.
    None,
    /// Decode, and the end of a prompt.
    Last,
    /// Verification, and log-probabilities of the prompt.
    All,
}

/// Consecutive tokens of one sequence in one step: a prefill chunk, one token of decode, or the
/// guesses to verify.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    pub tokens: &'a [TokenId],
    /// Position of `tokens[0]` in its sequence.
    pub first_position: usize,
    /// Pages of positions `0..first_position + tokens.len()`, in order (may be longer); with
    /// `streaming`, [`BlockId::NONE`] in place of those that no token of the span sees.
    pub blocks: &'a [BlockId],
    pub logits: LogitRows,
    /// What its tokens see; all before them where it is `None`.
    pub streaming: Option<StreamingAttention>,
}

/// Tokens of one sequence whose K and V are read or written, in one layer.
#[derive(Clone, Copy, Debug)]
pub struct KvSpan<'a> {
    pub layer: usize,
    pub blocks: &'a [BlockId],
    pub token_first: usize,
    pub token_count: usize,
    pub heads: Heads,
}

/// KV heads of a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Heads {
    #[default]
    All,
    Some {
        first: usize,
        count: usize,
    },
}

impl Heads {
    /// Among `all` heads there are.
    pub fn range(self, all: usize) -> Range<usize> {
        match self {
            Heads::All => 0..all,
            Heads::Some { first, count } => first..first + count,
        }
    }
}

/// Reads K and V in the wire's canonical order.
pub trait KvRead {
    /// Appends K, then V of the span's KV heads, each `[head][token][head_dim]` little-endian in
    /// the layout's dtype.
    fn read_kv(&self, span: &KvSpan<'_>, out: &mut Vec<u8>);
}

/// Told after each layer of a step, on the engine's own thread, while the next layer waits; so
/// it copies what it needs and returns.
pub trait LayerSink {
    fn layer_done(&mut self, layer: usize, kv: &dyn KvRead);
}

/// A sink for steps whose KV goes nowhere.
#[derive(Debug, Default)]
pub struct NoSink;

impl LayerSink for NoSink {
    fn layer_done(&mut self, _layer: usize, _kv: &dyn KvRead) {}
}

/// What one step asked of the hardware, counted while it ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCost {
    /// Of matrix products and attention; a multiplication and an addition are two.
    pub flops: u64,
    /// Those of them that were dots of bytes.
    pub dot_ops: u64,
    /// Weights, each once, in the form in which they lie in memory.
    pub weight_bytes: u64,
    /// K and V that attention reads, of each sequence once in each layer:
    /// `layers * KV heads * tokens * head size * 2 * bytes of an element`.
    pub kv_bytes: u64,
}

impl std::ops::AddAssign for StepCost {
    fn add_assign(&mut self, other: Self) {
        self.flops += other.flops;
        self.dot_ops += other.dot_ops;
        self.weight_bytes += other.weight_bytes;
        self.kv_bytes += other.kv_bytes;
    }
}

/// Failures of a backend. The step that met one has produced nothing.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("KV payload of {got} bytes does not fit the span: {want} bytes were expected")]
    PayloadSize { got: usize, want: usize },
    #[error("KV span {first}..{end} of layer {layer} lies outside the {blocks} blocks given")]
    SpanOutside { layer: usize, first: usize, end: usize, blocks: usize },
    #[error("{0}")]
    Device(String),
}

/// Hardware that holds one model's weights and one pool of KV pages.
///
/// For one model file and one numerics version the logits at a position are a function of the
/// tokens up to it and of [`Span::streaming`] alone, to the bit, whatever else is in the batch
/// (see `docs/numerics.md`).
pub trait Backend: Send {
    fn spec(&self) -> &ModelSpec;

    fn kv_layout(&self) -> &KvLayout;

    fn kv_blocks(&self) -> usize;

    fn numerics(&self) -> &NumericsVersion;

    /// Most tokens, over all spans, that one step takes.
    fn max_step_tokens(&self) -> usize;

    /// Most rows of logits that one step yields.
    fn max_logit_rows(&self) -> usize;

    /// Runs all spans through all layers, writing their K and V into their pages. Several spans
    /// may share pages that lie before their `first_position`; none writes into a page that
    /// another reads.
    ///
    /// Returns `logits[rows, vocab]`, rows in the order of the spans (and of the tokens within
    /// one, for `LogitRows::All`).
    ///
    /// # Errors
    /// `Device` when the hardware fails.
    ///
    /// # Panics
    /// Where a bound above is exceeded, `blocks` is too short or lacks a page that is seen, or a
    /// span with `streaming` meets layers with a window of their own: the planner's bug.
    fn step(
        &mut self,
        spans: &[Span<'_>],
        sink: &mut dyn LayerSink,
    ) -> Result<&[f32], BackendError>;

    /// What the last step asked of the hardware.
    fn last_cost(&self) -> StepCost;

    /// Places K and V that another node computed; `payload` as `KvRead::read_kv` yields it.
    ///
    /// # Errors
    /// `PayloadSize` and `SpanOutside`, with nothing written.
    fn write_kv(&mut self, span: &KvSpan<'_>, payload: &[u8]) -> Result<(), BackendError>;

    /// Copies the first `tokens` tokens of a page over all layers (copy on write).
    fn copy_block(&mut self, from: BlockId, to: BlockId, tokens: usize);

    /// Reads K and V outside a step: what a prefix cache held before it.
    fn kv(&self) -> &dyn KvRead;
}
