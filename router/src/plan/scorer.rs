//! What a node would cost a request, in milliseconds of somebody's waiting.

use crate::cluster::NodeView;

use super::PlanRequest;

/// Assumed before a node has measured itself.
const PREFILL_TOKENS_PER_S: f64 = 1_000.0;
const DECODE_STEP_MS: f64 = 20.0;

/// One aspect of a node's cost. Costs of several aspects add up; the lowest sum wins.
pub trait Scorer: Sync {
    fn cost_ms(&self, request: &PlanRequest, view: &NodeView) -> f64;
}

/// Each running answer slows the others; a pool that is nearly full preempts.
#[derive(Clone, Copy, Debug)]
pub struct DecodeLoad;

impl Scorer for DecodeLoad {
    fn cost_ms(&self, request: &PlanRequest, view: &NodeView) -> f64 {
        let step_ms = if view.decode_step_ms > 0.0 { view.decode_step_ms } else { DECODE_STEP_MS };
        let queue = view.busy_requests as f64 * step_ms;
        // Room for it beside what is used; without room it waits, far above any affinity.
        let full = if view.free_tokens < request.reserve_tokens { 60_000.0 } else { 0.0 };
        let used = 1.0 - view.free_tokens as f64 / view.total_tokens.max(1) as f64;
        queue + full + used * step_ms
    }
}

/// What the prefix cache lacks must be computed or sent.
#[derive(Clone, Copy, Debug)]
pub struct PrefixMiss;

impl Scorer for PrefixMiss {
    fn cost_ms(&self, request: &PlanRequest, view: &NodeView) -> f64 {
        let cached = if request.ignores_cache { 0 } else { view.cached_tokens };
        prefill_ms(request.prompt_tokens.saturating_sub(cached), view)
    }
}

/// Until a prefill node has computed what waits there and what it lacks of this prompt.
#[derive(Clone, Copy, Debug)]
pub struct PrefillTime;

impl Scorer for PrefillTime {
    fn cost_ms(&self, request: &PlanRequest, view: &NodeView) -> f64 {
        prefill_ms(view.waiting_tokens, view) + PrefixMiss.cost_ms(request, view)
    }
}

/// To compute so many tokens there.
pub(super) fn prefill_ms(tokens: usize, view: &NodeView) -> f64 {
    let speed = if view.prefill_tokens_per_s > 0.0 {
        view.prefill_tokens_per_s
    } else {
        PREFILL_TOKENS_PER_S
    };
    tokens as f64 / speed * 1e3
}
