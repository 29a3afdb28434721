//! Temperature, top-k, top-p, min-p, and the draw itself.
//!
//! Every sum runs in one fixed order, and ties go to the lower id, so that a draw does not depend
//! on the machine.

use std::cmp::Ordering;

use baton_types::{SamplingParams, TokenId};

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

/// Draws at `uniform` from `logits[vocab]`, whose highest is `peak`.
pub(super) fn draw(
    logits: &[f32],
    peak: f32,
    params: &SamplingParams,
    uniform: f64,
    candidates: &mut Vec<Candidate>,
) -> TokenId {
    let inverse = 1.0 / params.temperature;
    candidates.clear();
    candidates.extend(logits.iter().enumerate().map(|(id, &logit)| Candidate {
        id: id as TokenId,
        weight: weight((logit - peak) * inverse),
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

/// e^x for x <= 0, to about 2 ulp, by additions and multiplications alone: 2^n · p(f) with the
/// Taylor polynomial of 2^f on [-1/2, 1/2].
pub(super) fn weight(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    let scaled = x * std::f32::consts::LOG2_E;
    let whole = (scaled + 12_582_912.0) - 12_582_912.0;
    let f = scaled - whole;
    let p = 1.540_353e-4;
    let p = p * f + 1.333_355_8e-3;
    let p = p * f + 9.618_13e-3;
    let p = p * f + 5.550_411e-2;
    let p = p * f + 2.402_265e-1;
    let p = p * f + std::f32::consts::LN_2;
    let p = p * f + 1.0;
    p * f32::from_bits(((whole as i32 + 127) << 23) as u32)
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

fn pick(candidates: &[Candidate], uniform: f64) -> TokenId {
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
    last.expect("the likeliest token has weight 1 and passes every filter")
}
