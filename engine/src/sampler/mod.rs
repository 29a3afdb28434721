//! Draws the next token from logits.
//!
//! A draw is a pure function of (logits, parameters, seed, choice, index, tokens before), so a
//! stream that is resumed on another node draws what it would have drawn.

mod filter;
mod logprobs;
mod random;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use baton_types::{GenerateRequest, SamplingParams, TokenId};

pub use logprobs::token_logprobs;

/// The model gave NaN, or nothing that could be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the logits hold NaN or infinity, or leave no token to draw")]
pub struct UnusableLogits;

/// What a choice's draws depend on besides the logits: how many there were, and which tokens.
#[derive(Clone, Debug)]
pub struct SamplerState {
    seed: u64,
    choice: u16,
    drawn: u32,
    /// Over the answer's tokens, in order.
    history: u64,
    /// Occurrences in the answer; tokens of the prompt stand with 0. Kept only where a penalty
    /// needs it.
    seen: Option<HashMap<TokenId, u32>>,
}

/// Buffers that draws share.
#[derive(Debug, Default)]
pub struct Scratch {
    adjusted: Vec<f32>,
    candidates: Vec<filter::Candidate>,
}

impl SamplerState {
    /// The one way to build a state, for a new answer, a handoff and a recovery alike: the state
    /// after `tokens` of the choice's answer.
    pub fn replay(request: &GenerateRequest, choice: u16, tokens: &[TokenId]) -> Self {
        let s = &request.sampling;
        let penalised =
            s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0;
        let seen = penalised.then(|| request.prompt.iter().map(|&id| (id, 0)).collect());
        let mut state = Self { seed: s.seed, choice, drawn: 0, history: 0, seen };
        tokens.iter().for_each(|&id| state.push(id));
        state
    }

    /// Takes note of a token of the answer.
    pub fn push(&mut self, id: TokenId) {
        self.drawn += 1;
        self.history = random::mix(self.history ^ (u64::from(id) + 1));
        if let Some(seen) = &mut self.seen {
            *seen.entry(id).or_default() += 1;
        }
    }

    /// Proves that two nodes hold the same state.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("baton 2026 sampler state v1");
        hasher.update(&self.seed.to_le_bytes());
        hasher.update(&self.choice.to_le_bytes());
        hasher.update(&self.drawn.to_le_bytes());
        hasher.update(&self.history.to_le_bytes());
        let mut seen: Vec<_> = self.seen.iter().flatten().collect();
        seen.sort_unstable();
        for (id, count) in seen {
            hasher.update(&id.to_le_bytes());
            hasher.update(&count.to_le_bytes());
        }
        *hasher.finalize().as_bytes()
    }

    /// Draws the token at the next index from `logits[vocab]`. `banned` tokens are not drawn.
    /// The caller takes note of it with [`push`](Self::push).
    ///
    /// # Errors
    /// `UnusableLogits` for NaN or infinity anywhere, or where no token is left.
    pub fn draw(
        &self,
        logits: &[f32],
        params: &SamplingParams,
        banned: &[TokenId],
        scratch: &mut Scratch,
    ) -> Result<TokenId, UnusableLogits> {
        let unusable = |x: &f32| x.is_nan() || *x == f32::INFINITY;
        if logits.iter().fold(false, |found, x| found | unusable(x)) {
            return Err(UnusableLogits);
        }
        // Below it the division by the temperature overflows: the likeliest is all that is left.
        let is_greedy = !(1.0 / params.temperature).is_finite();
        let plain = self.seen.is_none() && params.logit_bias.is_empty() && banned.is_empty();
        if plain && is_greedy {
            return filter::likeliest(logits).ok_or(UnusableLogits);
        }
        let Scratch { adjusted, candidates } = scratch;
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        self.adjust(adjusted, params);
        for &id in banned {
            adjusted[id as usize] = f32::NEG_INFINITY;
        }
        let likeliest = filter::likeliest(adjusted).ok_or(UnusableLogits)?;
        if is_greedy {
            return Ok(likeliest);
        }
        let uniform = random::uniform(self.seed, self.choice, self.drawn);
        let peak = adjusted[likeliest as usize];
        filter::draw(adjusted, peak, params, uniform, candidates).ok_or(UnusableLogits)
    }

    /// Repetition, presence and frequency penalties, then the bias.
    fn adjust(&self, logits: &mut [f32], params: &SamplingParams) {
        for (&id, &count) in self.seen.iter().flatten() {
            let logit = &mut logits[id as usize];
            let scaled = if *logit > 0.0 {
                *logit / params.repetition_penalty
            } else {
                *logit * params.repetition_penalty
            };
            let in_answer = if count > 0 { params.presence_penalty } else { 0.0 };
            *logit = scaled - in_answer - count as f32 * params.frequency_penalty;
        }
        for &(id, bias) in &params.logit_bias {
            logits[id as usize] += bias;
        }
    }
}
