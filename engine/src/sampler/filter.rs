//! Temperature, top-k, top-p, min-p, and the draw itself.
//!
//! Every sum runs in one fixed order, and ties go to the lower id, so that a draw does not depend
//! on the machine.

use std::cmp::Ordering;

use baton_types::{SamplingParams, TokenId};

use crate::kernels::numerics::exp_unfused;

/// How many candidates top-p sorts at first; most distributions need fewer.
const NUCLEUS_FIRST: usize = 256;

#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    id: TokenId,
    weight: f32,
}

/// The token with the highest logit, the lowest id among equals; `None` where all are -inf.
pub(super) fn likeliest(logits: &[f32]) -> Option<TokenId> {
    let peak = logits.iter().fold(f32::NEG_INFINITY, |peak, &x| if x > peak { x } else { peak });
    if peak == f32::NEG_INFINITY {
        return None;
    }
    logits.iter().position(|&x| x == peak).map(|id| id as TokenId)
}

/// Draws at `uniform` from `logits[vocab]`, whose highest is `peak`; `None` where that is no
/// number to subtract from.
pub(super) fn draw(
    logits: &[f32],
    peak: f32,
    params: &SamplingParams,
    uniform: f64,
    candidates: &mut Vec<Candidate>,
) -> Option<TokenId> {
    let inverse = 1.0 / params.temperature;
    candidates.clear();
    candidates.extend(logits.iter().enumerate().map(|(id, &logit)| Candidate {
        id: id as TokenId,
        weight: exp_unfused((logit - peak) * inverse),
    }));
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < candidates.len() {
        sort_first(candidates, top_k);
        candidates.truncate(top_k);
    }
    if params.top_p < 1.0 {
        keep_nucleus(candidates, params.top_p);
    }
    if params.min_p > 0.0 {
        candidates.retain(|candidate| candidate.weight >= params.min_p);
    }
    pick(candidates, uniform)
}

/// Keeps the fewest candidates whose weights reach `share` of the sum.
fn keep_nucleus(candidates: &mut Vec<Candidate>, share: f32) {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    let wanted = total * f64::from(share);
    let mut sorted = NUCLEUS_FIRST.min(candidates.len());
    loop {
        sort_first(candidates, sorted);
        let mut sum = 0.0;
        for (at, candidate) in candidates[..sorted].iter().enumerate() {
            sum += f64::from(candidate.weight);
            if sum >= wanted {
                candidates.truncate(at + 1);
                return;
            }
        }
        if sorted == candidates.len() {
            return;
        }
        sorted = (sorted * 4).min(candidates.len());
    }
}

/// Brings the `count` heaviest to the front, in order.
fn sort_first(candidates: &mut [Candidate], count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, heavier);
    }
    candidates[..count].sort_unstable_by(heavier);
}

fn heavier(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

fn pick(candidates: &[Candidate], uniform: f64) -> Option<TokenId> {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    let mut left = total * uniform;
    let mut last = None;
    for candidate in candidates.iter().filter(|candidate| candidate.weight > 0.0) {
        left -= f64::from(candidate.weight);
        last = Some(candidate.id);
        if left < 0.0 {
            break;
        }
    }
    last
}
