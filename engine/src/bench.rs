//! How fast a backend is: prefill and decode, without sampling, scheduler or network, which is
//! what `llama-bench` and `llama-batched-bench` measure.

use std::time::Instant;

use baton_types::{BlockId, TokenId};
use serde::Serialize;

use crate::backend::{Backend, BackendError, LogitRows, NoSink, Span, StepCost};
use crate::limits::{MachineLimits, measure_limits};

/// Tokens that each sequence decodes in one measurement.
pub const DECODED_TOKENS: usize = 32;

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchPlan {
    /// Lengths of prompts.
    pub prefill_tokens: Vec<usize>,
    /// Sequences that decode together.
    pub batches: Vec<usize>,
    /// Tokens that each of them has before it decodes.
    pub context_tokens: usize,
    /// Measurements of each case; the median counts.
    pub repeats: usize,
}

/// Speed of each case, and what the machine can do at most.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    pub prefill: Vec<PrefillSpeed>,
    pub decode: Vec<DecodeSpeed>,
    /// The reads are of as many bytes as the weights that one token needs.
    pub limits: MachineLimits,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PrefillSpeed {
    pub tokens: usize,
    pub tokens_per_s: f64,
    #[serde(flatten)]
    pub work: Work,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DecodeSpeed {
    pub batch: usize,
    pub context: usize,
    /// Of all sequences together.
    pub tokens_per_s: f64,
    #[serde(flatten)]
    pub work: Work,
}

/// What a case made the machine do, as the engine counted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Work {
    /// Operations in a second; a multiplication and an addition are two.
    pub flops_per_s: f64,
    /// Those of them that are dots of bytes.
    pub dot_ops_per_s: f64,
    /// Bytes of weights and KV in a second.
    pub bytes_per_s: f64,
}

impl Work {
    fn over(cost: StepCost, seconds: f64) -> Self {
        Self {
            flops_per_s: cost.flops as f64 / seconds,
            dot_ops_per_s: cost.dot_ops as f64 / seconds,
            bytes_per_s: (cost.weight_bytes + cost.kv_bytes) as f64 / seconds,
        }
    }

    /// The time that it takes at the ceilings of arithmetic, of the time that it took; `None` where
    /// they were not measured.
    pub fn arithmetic_share(&self, limits: &MachineLimits) -> Option<f64> {
        let floats = (self.flops_per_s - self.dot_ops_per_s) / limits.float_ops_per_s;
        Some(floats + self.dot_ops_per_s / limits.dot_ops_per_s?)
    }
}

/// Why a case could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("{what} of {want} does not fit this backend, which takes {most}")]
    TooLarge { what: &'static str, want: usize, most: usize },
    #[error("{0} of 0 cannot be measured")]
    Zero(&'static str),
    #[error("the plan needs more KV than can be counted")]
    Overflow,
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("the machine's limits cannot be measured: {0}")]
    Limits(#[from] std::io::Error),
}

impl BenchPlan {
    /// Tokens of KV that the plan needs; the pool must hold them.
    ///
    /// # Errors
    /// Where something of the plan is 0, or too much to be counted.
    pub fn kv_tokens(&self, block_tokens: usize) -> Result<usize, BenchError> {
        let counts = [
            ("a prompt", self.prefill_tokens.contains(&0)),
            ("a batch", self.batches.contains(&0)),
            ("a context", self.context_tokens == 0),
            ("a number of measurements", self.repeats == 0),
        ];
        if let Some((what, _)) = counts.into_iter().find(|(_, zero)| *zero) {
            return Err(BenchError::Zero(what));
        }
        let whole = |tokens: usize| tokens.checked_next_multiple_of(block_tokens);
        let decode = self.context_tokens.checked_add(DECODED_TOKENS).and_then(whole);
        let most = self.batches.iter().copied().max().unwrap_or(0);
        let decode = decode.and_then(|tokens| tokens.checked_mul(most));
        let prefill = whole(self.prefill_tokens.iter().copied().max().unwrap_or(0));
        decode.zip(prefill).map(|(one, other)| one.max(other)).ok_or(BenchError::Overflow)
    }
}

/// Measures every case of `plan`.
///
/// # Errors
/// When a case does not fit the backend, or the backend fails.
pub fn measure(
    backend: &mut dyn Backend,
    plan: &BenchPlan,
    threads: usize,
) -> Result<BenchReport, BenchError> {
    check(backend, plan)?;
    let limits = limits(backend, threads)?;
    let mut report = BenchReport { prefill: Vec::new(), decode: Vec::new(), limits };
    for &tokens in &plan.prefill_tokens {
        let blocks = blocks_of(backend, 0, tokens);
        let cost = prefill(backend, tokens, &blocks)?;
        let seconds = median(plan.repeats, || {
            let start = Instant::now();
            prefill(backend, tokens, &blocks)?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        let (tokens_per_s, work) = (tokens as f64 / seconds, Work::over(cost, seconds));
        report.prefill.push(PrefillSpeed { tokens, tokens_per_s, work });
    }
    let context = plan.context_tokens;
    for &batch in &plan.batches {
        let blocks: Vec<Vec<BlockId>> =
            (0..batch).map(|i| blocks_of(backend, i, context + DECODED_TOKENS)).collect();
        for blocks in &blocks {
            prefill(backend, context, blocks)?;
        }
        let cost = decode(backend, context, &blocks)?;
        let seconds = median(plan.repeats, || {
            let start = Instant::now();
            decode(backend, context, &blocks)?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        let tokens_per_s = (batch * DECODED_TOKENS) as f64 / seconds;
        let work = Work::over(cost, seconds);
        report.decode.push(DecodeSpeed { batch, context, tokens_per_s, work });
    }
    Ok(report)
}

fn check(backend: &dyn Backend, plan: &BenchPlan) -> Result<(), BenchError> {
    let fail = |what, want, most| Err(BenchError::TooLarge { what, want, most });
    let block_tokens = backend.kv_layout().block_tokens as usize;
    let (want, most) = (plan.kv_tokens(block_tokens)?, backend.kv_blocks() * block_tokens);
    if want > most {
        return fail("a KV pool", want, most);
    }
    let longest = plan.prefill_tokens.iter().copied().max().unwrap_or(0);
    let longest = longest.max(plan.context_tokens + DECODED_TOKENS);
    if longest > backend.spec().context_tokens {
        return fail("a context", longest, backend.spec().context_tokens);
    }
    let batch = plan.batches.iter().copied().max().unwrap_or(0);
    let most = backend.max_logit_rows().min(backend.max_step_tokens());
    if batch > most {
        return fail("a batch", batch, most);
    }
    Ok(())
}

/// Computes a prompt of `tokens` tokens in steps as long as the backend takes them.
fn prefill(
    backend: &mut dyn Backend,
    tokens: usize,
    blocks: &[BlockId],
) -> Result<StepCost, BackendError> {
    let mut cost = StepCost::default();
    let prompt: Vec<TokenId> = (0..tokens).map(|i| token(backend, i)).collect();
    let mut first = 0;
    while first < tokens {
        let end = (first + backend.max_step_tokens()).min(tokens);
        let logits = if end == tokens { LogitRows::Last } else { LogitRows::None };
        let tokens = &prompt[first..end];
        let span = Span { tokens, first_position: first, blocks, logits, streaming: None };
        backend.step(&[span], &mut NoSink)?;
        cost += backend.last_cost();
        first = end;
    }
    Ok(cost)
}

/// Decodes `DECODED_TOKENS` tokens of all sequences, each after `context` tokens.
fn decode(
    backend: &mut dyn Backend,
    context: usize,
    blocks: &[Vec<BlockId>],
) -> Result<StepCost, BackendError> {
    let mut cost = StepCost::default();
    for i in 0..DECODED_TOKENS {
        let next: Vec<[TokenId; 1]> =
            (0..blocks.len()).map(|sequence| [token(backend, i * 31 + sequence)]).collect();
        let spans: Vec<Span<'_>> = next
            .iter()
            .zip(blocks)
            .map(|(tokens, blocks)| Span {
                tokens,
                first_position: context + i,
                blocks,
                logits: LogitRows::Last,
                streaming: None,
            })
            .collect();
        backend.step(&spans, &mut NoSink)?;
        cost += backend.last_cost();
    }
    Ok(cost)
}

/// Ceilings for reads of as many bytes as one token's weights have.
fn limits(backend: &mut dyn Backend, threads: usize) -> Result<MachineLimits, BenchError> {
    let blocks = blocks_of(backend, 0, 1);
    prefill(backend, 1, &blocks)?;
    let bytes = backend.last_cost().weight_bytes as usize;
    Ok(measure_limits(threads, bytes)?)
}

/// Pages of sequence `index`, when all take `tokens` tokens.
fn blocks_of(backend: &dyn Backend, index: usize, tokens: usize) -> Vec<BlockId> {
    let count = backend.kv_layout().blocks_for(tokens);
    (index * count..(index + 1) * count).map(|block| BlockId(block as u32)).collect()
}

/// Tokens that follow no pattern a cache could learn.
fn token(backend: &dyn Backend, index: usize) -> TokenId {
    ((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as TokenId
        % backend.spec().vocab as TokenId
}

fn median(
    repeats: usize,
    mut measure: impl FnMut() -> Result<f64, BackendError>,
) -> Result<f64, BackendError> {
    let mut seconds = (0..repeats.max(1)).map(|_| measure()).collect::<Result<Vec<_>, _>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}
