//! Chooses nodes for a request: filter, score, pick. Pure: it sees views, never connections.

mod pull;
mod scorer;
#[cfg(test)]
mod tests;

use baton_registry::Role;
use baton_types::{Error, ModelFingerprint, NodeId, NumericsVersion};

use crate::cluster::{NodeState, NodeView};

pub use pull::prefix_pull;
pub use scorer::{DecodeLoad, PrefillTime, PrefixMiss, Scorer};

/// What a plan is for.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    pub fingerprint: ModelFingerprint,
    /// The decode node's.
    pub numerics: NumericsVersion,
    /// A prefill node may hold KV in another precision, if none of the same can be had.
    pub kv_conversion: bool,
    pub prompt_tokens: usize,
    /// Prompt and as much of the answers as is reserved for.
    pub reserve_tokens: usize,
    /// What is left to prefill up to so many tokens is done at the decode node.
    pub local_prefill_max_tokens: usize,
    /// A prefill node that lacks so many tokens which another holds may pull them; 0: never.
    pub pull_min_tokens: usize,
    /// Nodes that have failed for this request.
    pub excluded: Vec<NodeId>,
    /// The node that is kept for this request, if one is.
    pub kept: Option<NodeId>,
    /// Log-probabilities of the prompt: nothing may come from a cache.
    pub ignores_cache: bool,
    /// Tokens are there already: the decode node computes what it lacks.
    pub is_recovery: bool,
    /// Breaks ties, so that equal nodes share.
    pub tie_break: u64,
}

/// Where a request goes.
#[derive(Clone, Debug)]
pub struct Plan {
    pub decode: NodeView,
    /// `None`: prefill at the decode node.
    pub prefill: Option<NodeView>,
    /// Why, in the words of docs/explain.md.
    pub reason: Reason,
}

/// Why a plan prefills where it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A prefill node computes the prompt.
    Remote,
    /// The prompt is short.
    ShortPrompt,
    /// The decode node holds most of the prompt.
    SmallRemainder,
    /// No prefill node can be had.
    NoPrefillNode,
    /// An answer goes on after its decode node was lost.
    Recovery,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Remote => "remote_prefill",
            Reason::ShortPrompt => "short_prompt",
            Reason::SmallRemainder => "small_remainder",
            Reason::NoPrefillNode => "no_prefill_node",
            Reason::Recovery => "recovery",
        }
    }
}

/// Plans a request over the nodes that there are.
///
/// # Errors
/// `Unavailable` where no decode node of that model can be asked now; `ResourceExhausted` where
/// those that could are kept for requests that have waited longer.
pub fn plan(request: &PlanRequest, nodes: &[NodeView]) -> Result<Plan, Error> {
    let decode = pick(request, false, nodes.iter(), Role::Decode, &[&DecodeLoad, &PrefixMiss])
        .ok_or_else(|| no_decode_node(request, nodes))?;
    let cached = if request.ignores_cache { 0 } else { decode.cached_tokens };
    let rest = request.prompt_tokens.saturating_sub(cached);
    let local = |reason| Plan { decode: decode.clone(), prefill: None, reason };
    if request.is_recovery {
        return Ok(local(Reason::Recovery));
    }
    if request.prompt_tokens <= request.local_prefill_max_tokens {
        return Ok(local(Reason::ShortPrompt));
    }
    if rest <= request.local_prefill_max_tokens {
        return Ok(local(Reason::SmallRemainder));
    }
    match another_prefill(request, &decode, nodes) {
        Some(prefill) => Ok(Plan { prefill: Some(prefill), ..local(Reason::Remote) }),
        None => Ok(local(Reason::NoPrefillNode)),
    }
}

/// The prefill node for a request, or the one to use instead of one that failed; none that could
/// not reach `decode` of late. Any of the decode node's precision is better than one whose KV must
/// be converted.
pub fn another_prefill(
    request: &PlanRequest,
    decode: &NodeView,
    nodes: &[NodeView],
) -> Option<NodeView> {
    let pick = |convert| {
        let reach_it = nodes.iter().filter(|view| view.node.may_hand_over(decode));
        pick(request, convert, reach_it, Role::Prefill, &[&PrefillTime])
    };
    pick(false).or_else(|| if request.kv_conversion { pick(true) } else { None })
}

/// The numerics of new requests for a model: those of a decode node. Where decode nodes differ,
/// all take those for which a decode node is ready, then a prefill node of the same; then those
/// of most nodes; then the first by name.
pub fn numerics(fingerprint: ModelFingerprint, nodes: &[NodeView]) -> Option<NumericsVersion> {
    let of = |role| {
        nodes.iter().filter(move |view| view.role == role && view.fingerprint == Some(fingerprint))
    };
    let ready = |role, numerics: &NumericsVersion| {
        let is_ready = |view: &&NodeView| view.state == NodeState::Ready;
        of(role).filter(is_ready).filter(|view| view.numerics == *numerics).count()
    };
    let rank = |numerics: &NumericsVersion| {
        let decode = ready(Role::Decode, numerics);
        (decode > 0, ready(Role::Prefill, numerics) > 0, decode)
    };
    let order = |a: &&NumericsVersion, b: &&NumericsVersion| {
        rank(a).cmp(&rank(b)).then_with(|| b.0.cmp(&a.0))
    };
    of(Role::Decode).map(|view| &view.numerics).max_by(order).cloned()
}

/// The cheapest node of that role; with `convert`, nodes that differ in the precision of KV fit
/// too.
fn pick<'a>(
    request: &PlanRequest,
    convert: bool,
    nodes: impl Iterator<Item = &'a NodeView>,
    role: Role,
    scorers: &[&dyn Scorer],
) -> Option<NodeView> {
    let cost = |view: &NodeView| -> f64 {
        scorers.iter().map(|scorer| scorer.cost_ms(request, view)).sum()
    };
    let order = |view: &NodeView| {
        let name = view.node.member().id.as_str();
        name.bytes().fold(request.tie_break, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    };
    nodes
        .filter(|view| view.role == role && fits(request, view, convert))
        .min_by(|a, b| cost(a).total_cmp(&cost(b)).then(order(a).cmp(&order(b))))
        .cloned()
}

/// Ready, of the same model and arithmetic, not known to fail, and not kept for another. A request
/// that was running already goes on wherever there is room.
fn fits(request: &PlanRequest, view: &NodeView, convert: bool) -> bool {
    is_able(request, view, convert)
        && (!view.is_kept
            || request.is_recovery
            || request.kept.as_ref() == Some(&view.node.member().id))
}

fn is_able(request: &PlanRequest, view: &NodeView, convert: bool) -> bool {
    view.state == NodeState::Ready
        && view.fingerprint == Some(request.fingerprint)
        && view.numerics.may_pair(&request.numerics, convert)
        && !request.excluded.contains(&view.node.member().id)
}

fn no_decode_node(request: &PlanRequest, nodes: &[NodeView]) -> Error {
    let decode: Vec<_> = nodes.iter().filter(|view| view.role == Role::Decode).collect();
    if decode.iter().any(|view| is_able(request, view, false)) {
        let why = "what the decode nodes free is kept for requests that have waited longer";
        return Error::exhausted(why, 1_000);
    }
    let ready = decode.iter().filter(|view| view.state == NodeState::Ready).count();
    Error {
        retry_after_ms: Some(1_000),
        ..Error::unavailable(format!(
            "no decode node can take the request: {} known, {ready} ready, {} excluded after \
             failures, for model {} ({})",
            decode.len(),
            request.excluded.len(),
            request.fingerprint,
            request.numerics
        ))
    }
}
