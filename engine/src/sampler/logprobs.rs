//! Log-probabilities of the model's own distribution.

use baton_types::{TokenId, TokenLogprobs};

use crate::kernels::numerics::{exp_unfused, ln};

/// Log-probability of `id` under `logits[vocab]`, and of the `top` likeliest, before any sampling
/// parameter.
pub fn token_logprobs(logits: &[f32], id: TokenId, top: usize) -> TokenLogprobs {
    let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(exp_unfused(x - peak))).sum();
    let log_sum = f64::from(peak) + ln(sum);
    let logprob = |id: TokenId| (f64::from(logits[id as usize]) - log_sum) as f32;
    let mut ids: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    let likelier = |a: &TokenId, b: &TokenId| {
        logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b))
    };
    let top = top.min(ids.len());
    if top == 0 {
        ids.clear();
    } else if top < ids.len() {
        ids.select_nth_unstable_by(top, likelier);
        ids.truncate(top);
    }
    ids.sort_unstable_by(likelier);
    TokenLogprobs {
        logprob: logprob(id),
        top: ids.into_iter().map(|id| (id, logprob(id))).collect(),
    }
}
