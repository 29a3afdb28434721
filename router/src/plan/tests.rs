use std::sync::Arc;

use baton_registry::Member;
use baton_types::{ErrorCode, Incarnation, KvDtype};

use super::*;
use crate::cluster::Node;

pub(super) fn view(id: &str, role: Role) -> NodeView {
    let member = Member {
        id: NodeId::new(id),
        role,
        incarnation: Incarnation(1),
        address: "127.0.0.1:1".into(),
        model: String::new(),
        fingerprint: String::new(),
        numerics: String::new(),
    };
    NodeView {
        node: Arc::new(Node::for_plan(member)),
        role,
        fingerprint: Some(ModelFingerprint([1; 32])),
        numerics: NumericsVersion("n".into()),
        incarnation: Incarnation(1),
        state: NodeState::Ready,
        is_kept: false,
        cached_tokens: 0,
        busy_requests: 0,
        waiting_tokens: 0,
        free_tokens: 10_000,
        total_tokens: 10_000,
        prefill_tokens_per_s: 1_000.0,
        decode_step_ms: 10.0,
        kv_bytes_per_s: 0.0,
    }
}

pub(super) fn request(prompt_tokens: usize) -> PlanRequest {
    PlanRequest {
        fingerprint: ModelFingerprint([1; 32]),
        numerics: NumericsVersion("n".into()),
        kv_conversion: false,
        prompt_tokens,
        reserve_tokens: prompt_tokens + 16,
        local_prefill_max_tokens: 64,
        pull_min_tokens: 0,
        excluded: vec![],
        kept: None,
        ignores_cache: false,
        is_recovery: false,
        tie_break: 7,
    }
}

fn names(plan: &Plan) -> (String, Option<String>) {
    let name = |view: &NodeView| view.node.member().id.to_string();
    (name(&plan.decode), plan.prefill.as_ref().map(name))
}

#[tokio::test]
async fn long_prompts_go_to_a_prefill_node_and_short_ones_do_not() {
    let nodes = [view("d", Role::Decode), view("p", Role::Prefill)];
    let long = plan(&request(500), &nodes).unwrap();
    assert_eq!((names(&long).1.as_deref(), long.reason), (Some("p"), Reason::Remote));
    let short = plan(&request(64), &nodes).unwrap();
    assert_eq!((names(&short).1, short.reason), (None, Reason::ShortPrompt));
    let alone = plan(&request(500), &nodes[..1]).unwrap();
    assert_eq!(alone.reason, Reason::NoPrefillNode);
    let recovery = PlanRequest { is_recovery: true, ..request(500) };
    assert_eq!(plan(&recovery, &nodes).unwrap().reason, Reason::Recovery);
}

#[tokio::test]
async fn affinity_wins_until_the_node_is_loaded() {
    let mut warm = view("warm", Role::Decode);
    warm.cached_tokens = 480;
    let nodes = [view("cold", Role::Decode), warm.clone()];
    let chosen = plan(&request(500), &nodes).unwrap();
    assert_eq!(names(&chosen).0, "warm");
    assert_eq!(chosen.reason, Reason::SmallRemainder);
    warm.busy_requests = 60;
    let chosen = plan(&request(500), &[view("cold", Role::Decode), warm.clone()]).unwrap();
    assert_eq!(names(&chosen).0, "cold");
    warm.busy_requests = 0;
    warm.free_tokens = 100;
    let chosen = plan(&request(500), &[view("cold", Role::Decode), warm]).unwrap();
    assert_eq!(names(&chosen).0, "cold");
}

#[tokio::test]
async fn the_prefill_node_that_is_done_first_is_taken() {
    let mut busy = view("busy", Role::Prefill);
    busy.waiting_tokens = 3_000;
    let mut fast = view("fast", Role::Prefill);
    fast.waiting_tokens = 4_000;
    fast.prefill_tokens_per_s = 10_000.0;
    let nodes = [view("d", Role::Decode), busy, fast];
    assert_eq!(names(&plan(&request(500), &nodes).unwrap()).1.as_deref(), Some("fast"));
}

#[tokio::test]
async fn nodes_that_differ_or_fail_are_never_taken() {
    let mut other_model = view("a", Role::Decode);
    other_model.fingerprint = Some(ModelFingerprint([2; 32]));
    let mut other_numerics = view("b", Role::Decode);
    other_numerics.numerics = NumericsVersion("m".into());
    let mut draining = view("c", Role::Decode);
    draining.state = NodeState::Draining;
    let excluded = view("e", Role::Decode);
    let mut request = request(500);
    request.excluded = vec![NodeId::new("e")];
    let nodes = [other_model, other_numerics, draining, excluded];
    let error = plan(&request, &nodes).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("4 known, 3 ready, 1 excluded"), "{}", error.message);
}

#[tokio::test]
async fn equal_nodes_share_by_the_tie_break() {
    let nodes: Vec<_> = (0..4).map(|at| view(&format!("d{at}"), Role::Decode)).collect();
    let chosen: std::collections::BTreeSet<_> = (0..64)
        .map(|tie_break| plan(&PlanRequest { tie_break, ..request(10) }, &nodes).unwrap())
        .map(|plan| names(&plan).0)
        .collect();
    assert_eq!(chosen.len(), 4);
}

#[tokio::test]
async fn a_node_that_is_kept_takes_whom_it_is_kept_for() {
    let mut kept = view("kept", Role::Decode);
    let keeps = kept.node.keep().expect("it is free");
    assert!(kept.node.keep().is_none());
    kept.is_kept = kept.node.view(&[]).is_kept;
    let alone = [kept.clone()];
    let error = plan(&request(10), &alone).unwrap_err();
    assert_eq!(error.code, ErrorCode::ResourceExhausted);
    assert!(error.retry_after_ms.is_some());
    let elder = PlanRequest { kept: Some(keeps.node().clone()), ..request(10) };
    assert_eq!(names(&plan(&elder, &alone).unwrap()).0, "kept");
    let recovery = PlanRequest { is_recovery: true, ..request(10) };
    assert_eq!(names(&plan(&recovery, &alone).unwrap()).0, "kept");
    let both = [kept.clone(), view("free", Role::Decode)];
    for tie_break in 0..16 {
        assert_eq!(
            names(&plan(&PlanRequest { tie_break, ..request(10) }, &both).unwrap()).0,
            "free"
        );
    }
    drop(keeps);
    assert!(!kept.node.view(&[]).is_kept);
}

fn of_kv(id: &str, role: Role, kv: KvDtype) -> NodeView {
    NodeView { numerics: NumericsVersion::new("n", kv), ..view(id, role) }
}

#[tokio::test]
async fn kv_is_converted_only_where_it_may_be_and_no_equal_node_can_be_had() {
    let decode = of_kv("d", Role::Decode, KvDtype::Int8);
    let other = of_kv("bf16", Role::Prefill, KvDtype::Bf16);
    let mut equal = of_kv("int8", Role::Prefill, KvDtype::Int8);
    let exact = PlanRequest { numerics: decode.numerics.clone(), ..request(500) };
    let may = PlanRequest { kv_conversion: true, ..exact.clone() };
    let pair = [decode.clone(), other.clone()];
    assert_eq!(plan(&exact, &pair).unwrap().reason, Reason::NoPrefillNode);
    let plan_of = |request: &PlanRequest, nodes: &[NodeView]| names(&plan(request, nodes).unwrap());
    assert_eq!(plan_of(&may, &pair).1.as_deref(), Some("bf16"));
    // However much waits there.
    equal.waiting_tokens = 1_000_000;
    let all = [decode.clone(), other.clone(), equal.clone()];
    assert_eq!(plan_of(&may, &all).1.as_deref(), Some("int8"));
    equal.state = NodeState::Draining;
    let all = [decode.clone(), other.clone(), equal];
    assert_eq!(plan_of(&may, &all).1.as_deref(), Some("bf16"));
    assert_eq!(another_prefill(&exact, &decode, &all).map(|view| view.role), None);
    // A decode node is never of another precision, and arithmetic never differs.
    assert!(plan(&may, &[of_kv("d", Role::Decode, KvDtype::Bf16), other]).is_err());
    let mut foreign = of_kv("m", Role::Prefill, KvDtype::Bf16);
    foreign.numerics = NumericsVersion::new("m", KvDtype::Bf16);
    assert_eq!(plan(&may, &[decode, foreign]).unwrap().reason, Reason::NoPrefillNode);
}

/// Each works with others; and with a new start of the one that could not be reached.
#[tokio::test]
async fn two_nodes_that_cannot_reach_one_another_are_left_apart() {
    let (one, other) = (view("p1", Role::Prefill), view("p2", Role::Prefill));
    let mut decode = view("d", Role::Decode);
    one.node.handed_over(&decode, true);
    let nodes = [decode.clone(), one.clone()];
    assert_eq!(plan(&request(500), &nodes).unwrap().reason, Reason::NoPrefillNode);
    let nodes = [decode.clone(), one.clone(), other];
    assert_eq!(names(&plan(&request(500), &nodes).unwrap()).1.as_deref(), Some("p2"));
    let nodes = [view("d2", Role::Decode), one.clone()];
    assert_eq!(names(&plan(&request(500), &nodes).unwrap()).1.as_deref(), Some("p1"));
    decode.incarnation = Incarnation(decode.incarnation.0 + 1);
    let nodes = [decode, one];
    assert_eq!(names(&plan(&request(500), &nodes).unwrap()).1.as_deref(), Some("p1"));
}

#[tokio::test]
async fn a_request_has_the_numerics_of_a_decode_node() {
    let model = ModelFingerprint([1; 32]);
    let of = |nodes: &[NodeView]| numerics(model, nodes).and_then(|found| found.kv_dtype());
    let prefill = of_kv("p", Role::Prefill, KvDtype::Bf16);
    assert_eq!(of(std::slice::from_ref(&prefill)), None);
    let [one, two, three] =
        ["one", "two", "three"].map(|id| of_kv(id, Role::Decode, KvDtype::Int8));
    let mut bf16 = of_kv("four", Role::Decode, KvDtype::Bf16);
    assert_eq!(of(&[prefill.clone(), one.clone()]), Some(KvDtype::Int8));
    // A pair of equal precision is worth more than many decode nodes.
    let all = [one.clone(), two.clone(), three.clone(), bf16.clone(), prefill.clone()];
    assert_eq!(of(&all), Some(KvDtype::Bf16));
    assert_eq!(of(&all[..4]), Some(KvDtype::Int8));
    // One of each: by name, and in whatever order they stand.
    assert_eq!(of(&[one.clone(), bf16.clone()]), Some(KvDtype::Bf16));
    assert_eq!(of(&[bf16.clone(), one.clone()]), Some(KvDtype::Bf16));
    bf16.state = NodeState::Unreachable;
    assert_eq!(of(&[one, bf16.clone(), prefill.clone()]), Some(KvDtype::Int8));
    assert_eq!(of(&[bf16, prefill]), Some(KvDtype::Bf16), "it may come back");
    let other = NodeView { fingerprint: None, ..two };
    assert_eq!(of(&[other]), None);
}
