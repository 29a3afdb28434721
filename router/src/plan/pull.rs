//! Whether a prefill node should have a prompt's first tokens from another node instead of
//! computing them.

use super::scorer::{Scorer, prefill_ms};
use super::{PlanRequest, PrefixMiss, is_able};
use crate::cluster::NodeView;

/// Assumed before a node has measured its link.
const LINK_BYTES_PER_S: f64 = 500e6;
/// What the holder's engine reads between two of its steps.
const READ_BYTES: f64 = (8 << 20) as f64;
/// A prefill step has about so many tokens.
const STEP_TOKENS: usize = 512;
/// Two calls and their waits.
const FIXED_MS: f64 = 5.0;
/// A prediction must promise so much of the computing's time to be spared.
const WORTH: f64 = 0.7;
/// Pulls are given at least so long.
const WITHIN_LEAST_MS: f64 = 100.0;

/// Where to have a prompt's first tokens.
#[derive(Clone, Debug)]
pub struct PrefixPull {
    pub from: NodeView,
    /// Leading tokens that it holds.
    pub tokens: usize,
    /// To compute what it spares takes about so long.
    pub within_ms: u64,
}

/// The best source of what `prefill` lacks, where one is predicted to be faster than computing. It
/// holds KV as that node does, which need not be as the decode node does; one token of it takes
/// `kv_token_bytes`.
pub fn prefix_pull(
    request: &PlanRequest,
    prefill: &NodeView,
    kv_token_bytes: usize,
    nodes: &[NodeView],
) -> Option<PrefixPull> {
    if request.pull_min_tokens == 0 || request.ignores_cache {
        return None;
    }
    let computing = PrefixMiss.cost_ms(request, prefill);
    let candidates = nodes.iter().filter(|view| {
        is_able(request, view, true)
            && view.numerics == prefill.numerics
            && view.node.member().id != prefill.node.member().id
            && prefill.node.may_pull(&view.node.member().id)
            && view.cached_tokens >= prefill.cached_tokens + request.pull_min_tokens
    });
    let priced = candidates.filter_map(|view| {
        let tokens = view.cached_tokens - prefill.cached_tokens;
        let spared = prefill_ms(tokens, prefill);
        let pulling = pull_ms(tokens * kv_token_bytes, view);
        let is_worth_it = pulling <= WORTH * spared;
        is_worth_it.then_some((computing - spared + pulling, spared, view))
    });
    let (_, spared, view) = priced.min_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
    let within_ms = spared.max(WITHIN_LEAST_MS).ceil() as u64;
    Some(PrefixPull { from: view.clone(), tokens: view.cached_tokens, within_ms })
}

/// The holder reads between its steps, and then its link is the limit.
fn pull_ms(bytes: usize, holder: &NodeView) -> f64 {
    let link = if holder.kv_bytes_per_s > 0.0 { holder.kv_bytes_per_s } else { LINK_BYTES_PER_S };
    let step = if holder.waiting_tokens > 0 {
        prefill_ms(holder.waiting_tokens.min(STEP_TOKENS), holder)
    } else if holder.busy_requests > 0 {
        holder.decode_step_ms
    } else {
        0.0
    };
    let reads = (bytes as f64 / READ_BYTES).ceil();
    FIXED_MS + reads * step + bytes as f64 / link * 1e3
}

#[cfg(test)]
mod tests {
    use baton_registry::Role;
    use baton_types::{KvDtype, NumericsVersion};

    use super::*;
    use crate::cluster::NodeState;
    use crate::plan::tests::{request, view};

    fn asked() -> PlanRequest {
        PlanRequest { pull_min_tokens: 128, ..request(2_000) }
    }

    fn holder(id: &str, tokens: usize) -> NodeView {
        NodeView { cached_tokens: tokens, ..view(id, Role::Decode) }
    }

    fn pull(request: &PlanRequest, prefill: &NodeView, nodes: &[NodeView]) -> Option<PrefixPull> {
        prefix_pull(request, prefill, 23_040, nodes)
    }

    fn name(pull: Option<PrefixPull>) -> Option<String> {
        pull.map(|pull| pull.from.node.member().id.to_string())
    }

    #[tokio::test]
    async fn the_node_that_spares_most_is_asked() {
        let cold = view("p", Role::Prefill);
        let mut far = holder("far", 1_920);
        far.kv_bytes_per_s = 10e6;
        let nodes = [cold.clone(), holder("some", 960), far.clone(), holder("most", 1_920)];
        let most = pull(&asked(), &cold, &nodes).unwrap();
        assert_eq!((most.tokens, most.within_ms), (1_920, 1_920));
        assert_eq!(name(Some(most)).as_deref(), Some("most"));
        // 44 MB at 10 MB/s take longer than to compute them.
        assert!(pull(&asked(), &cold, &[far]).is_none());
    }

    #[tokio::test]
    async fn nothing_is_pulled_that_is_there_or_not_worth_it() {
        let (cold, some) = (view("p", Role::Prefill), holder("d", 960));
        let warm = NodeView { cached_tokens: 900, ..view("p", Role::Prefill) };
        assert!(pull(&asked(), &warm, std::slice::from_ref(&some)).is_none());
        let fast = NodeView { prefill_tokens_per_s: 100_000.0, ..cold.clone() };
        assert!(pull(&asked(), &fast, std::slice::from_ref(&some)).is_none());
        let itself = NodeView { cached_tokens: 960, ..cold.clone() };
        assert!(pull(&asked(), &cold, &[itself]).is_none());
        let mut busy = some.clone();
        (busy.busy_requests, busy.decode_step_ms) = (1, 400.0);
        assert!(pull(&asked(), &cold, &[busy]).is_none());
        let mut other = some.clone();
        other.numerics = NumericsVersion::new("n", KvDtype::Int8);
        assert!(pull(&asked(), &cold, std::slice::from_ref(&other)).is_none());
        // As the prefill node holds it, whatever the decode node does.
        let int8 = NodeView { numerics: other.numerics.clone(), ..cold.clone() };
        let bf16 = NumericsVersion::new("n", KvDtype::Bf16);
        let converts = PlanRequest { numerics: bf16, kv_conversion: true, ..asked() };
        assert_eq!(name(pull(&converts, &int8, &[other])).as_deref(), Some("d"));
        let id = &some.node.member().id;
        cold.node.pulled(id, true);
        assert!(pull(&asked(), &cold, std::slice::from_ref(&some)).is_none());
        cold.node.pulled(id, false);
        let mut gone = some.clone();
        gone.state = NodeState::Unreachable;
        assert!(pull(&asked(), &cold, &[gone]).is_none());
        for refused in [
            PlanRequest { pull_min_tokens: 0, ..asked() },
            PlanRequest { ignores_cache: true, ..asked() },
            PlanRequest { excluded: vec![some.node.member().id.clone()], ..asked() },
        ] {
            assert!(pull(&refused, &cold, std::slice::from_ref(&some)).is_none());
        }
        assert_eq!(name(pull(&asked(), &cold, &[some])).as_deref(), Some("d"));
    }
}
