//! How well a model predicts a text.

use baton_types::{BlockId, StreamingAttention, TokenId, context_most};

use crate::backend::{Backend, BackendError, LogitRows, NoSink, Span};

/// Perplexity of a text, and on how many predictions it rests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    pub perplexity: f64,
    pub scored_tokens: usize,
}

/// Why a text could not be scored.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    #[error("token {0} is none of the model's: its tokenizer has tokens without embeddings")]
    UnknownToken(TokenId),
    #[error("the model gives no probabilities: its weights are damaged, or not of this model")]
    NotANumber,
    #[error("{got} tokens are too few: {want} fill the first chunk")]
    TooShort { got: usize, want: usize },
    #[error(
        "a context of {asked} tokens is not supported: it must be even, and 4 to {most} tokens, \
             which is what the model and the KV pool hold"
    )]
    Context { asked: usize, most: usize },
    #[error(
        "{} sinks and a window of {} are not supported: the window is at least 1, both fit the \
             model's context, and its layers have no window of their own",
        .0.sinks,
        .0.window
    )]
    Streaming(StreamingAttention),
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Whether chunks of `asked` tokens can be scored, where `most` fit.
///
/// # Errors
/// Where they cannot.
pub fn check_context(asked: usize, most: usize) -> Result<(), EvalError> {
    match (4..=most).contains(&asked) && asked.is_multiple_of(2) {
        true => Ok(()),
        false => Err(EvalError::Context { asked, most }),
    }
}

/// Scores `tokens` as llama.cpp's `llama-perplexity` does: the text is cut into chunks of
/// `context` tokens, each computed alone, and the predictions of its second half are scored. If
/// `bos` is given, it takes the place of each chunk's first token. With `streaming` a chunk may be
/// longer than the model's context.
///
/// # Errors
/// When there is not one full chunk, or the backend fails.
pub fn perplexity(
    backend: &mut dyn Backend,
    tokens: &[TokenId],
    context: usize,
    bos: Option<TokenId>,
    streaming: Option<StreamingAttention>,
) -> Result<Perplexity, EvalError> {
    let block_tokens = backend.kv_layout().block_tokens as usize;
    let spec = backend.spec();
    if let Some(streaming) = streaming {
        let fits = streaming.cache_tokens() <= spec.context_tokens;
        if streaming.window == 0 || !fits || spec.features.window.is_some() {
            return Err(EvalError::Streaming(streaming));
        }
    }
    let most = context_most(spec.context_tokens, streaming).min(backend.kv_blocks() * block_tokens);
    check_context(context, most)?;
    if tokens.len() < context {
        return Err(EvalError::TooShort { got: tokens.len(), want: context });
    }
    let vocab = spec.vocab;
    let unknown = |token: &&TokenId| **token as usize >= vocab;
    if let Some(token) = tokens.iter().chain(&bos).find(unknown) {
        return Err(EvalError::UnknownToken(*token));
    }
    let blocks: Vec<BlockId> =
        (0..context.div_ceil(block_tokens)).map(|block| BlockId(block as u32)).collect();
    let mut negative_log = 0.0;
    let mut scored_tokens = 0;
    for chunk in tokens.chunks_exact(context) {
        let mut chunk = chunk.to_vec();
        if let Some(bos) = bos {
            chunk[0] = bos;
        }
        negative_log += score_chunk(backend, &chunk, &blocks, streaming)?;
        scored_tokens += context - 1 - context / 2;
    }
    let perplexity = libm::exp(negative_log / scored_tokens as f64);
    if perplexity.is_nan() {
        return Err(EvalError::NotANumber);
    }
    Ok(Perplexity { perplexity, scored_tokens })
}

/// `Σ -ln p(token)` over the predictions made at positions `context / 2 .. context - 1`.
fn score_chunk(
    backend: &mut dyn Backend,
    chunk: &[TokenId],
    blocks: &[BlockId],
    streaming: Option<StreamingAttention>,
) -> Result<f64, EvalError> {
    let vocab = backend.spec().vocab;
    let unscored = chunk.len() / 2;
    let mut negative_log = 0.0;
    let mut first = 0;
    while first < chunk.len() {
        let (end, logits) = if first < unscored {
            ((first + backend.max_step_tokens()).min(unscored), LogitRows::None)
        } else {
            let most = backend.max_step_tokens().min(backend.max_logit_rows());
            ((first + most).min(chunk.len()), LogitRows::All)
        };
        let tokens = &chunk[first..end];
        let span = Span { tokens, first_position: first, blocks, logits, streaming };
        let rows = backend.step(&[span], &mut NoSink)?;
        for (row, next) in rows.chunks_exact(vocab).zip(&chunk[first + 1..]) {
            negative_log -= log_probability(row, *next);
        }
        first = end;
    }
    Ok(negative_log)
}

/// Natural logarithm of `softmax(logits)[token]`, in f64.
fn log_probability(logits: &[f32], token: TokenId) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| libm::exp(f64::from(x - max))).sum();
    f64::from(logits[token as usize] - max) - libm::log(sum)
}
