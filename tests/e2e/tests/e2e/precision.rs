//! Nodes that hold KV in different precisions: apart unless all three say that KV may be converted;
//! then together, and nothing that was converted serves a request that asks for the exact KV.

use std::net::SocketAddr;
use std::time::Duration;

use baton_client::{Client, Completion, GenerateRequest};
use baton_engine_host::NodeConfig;
use baton_registry::Role;
use baton_router::{RouterApp, RouterConfig, StaticNode};
use baton_runtime::shutdown::Shutdown;
use baton_tests::ask::prompt;
use baton_tests::cluster::client;
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::{alone, http, load, wait};
use baton_types::{KvDtype, TokenId};
use serde_json::Value;

const IDLE_WITHIN: Duration = Duration::from_secs(3);
const READY_WITHIN: Duration = Duration::from_secs(30);
const ANSWER_TOKENS: u32 = 40;
/// Prompt tokens of each request, and its answers.
const SHAPES: [(usize, u32); 3] = [(150, 1), (333, 3), (64, 1)];

/// Who may convert KV, or have it converted.
#[derive(Clone, Copy, Debug)]
struct Converts {
    router: bool,
    prefill: bool,
    decode: bool,
}

const ALL: Converts = Converts { router: true, prefill: true, decode: true };

fn node(kv_dtype: KvDtype, kv_conversion: bool) -> NodeConfig {
    NodeConfig { kv_dtype, kv_conversion, ..node_config() }
}

async fn start(prefill: KvDtype, decode: KvDtype, converts: Converts) -> Local {
    let kv_conversion = converts.router;
    let router = RouterConfig { local_prefill_max_tokens: 0, kv_conversion, ..router_config() };
    Local::start(router, node(prefill, converts.prefill), node(decode, converts.decode)).await
}

async fn ask(client: &Client, prompt: &[TokenId], choices: u32) -> (Vec<Vec<TokenId>>, Value) {
    let request = GenerateRequest::token_ids(prompt.to_vec())
        .max_tokens(ANSWER_TOKENS)
        .temperature(if choices > 1 { 0.8 } else { 0.0 })
        .seed(11)
        .choices(choices)
        .ignore_eos(true)
        .explain(true);
    let answer = async { client.generate(request).await?.collect().await };
    let answer = wait::in_time(load::ANSWER_WITHIN, "an answer", answer).await;
    let Completion { answers, done, .. } = answer.unwrap_or_else(|error| panic!("{error}"));
    let ids: Vec<_> = answers.into_iter().map(|answer| answer.token_ids).collect();
    assert!(ids.iter().all(|ids| ids.len() == ANSWER_TOKENS as usize));
    assert_eq!(ids.len(), choices as usize);
    (ids, serde_json::from_str(&done.explain_json).expect("the explanation is JSON"))
}

/// Prompts, and what a lone node of that precision answers to them.
async fn alone_answers(kv: KvDtype) -> Vec<(Vec<TokenId>, u32, Vec<Vec<TokenId>>)> {
    let router = RouterConfig { local_prefill_max_tokens: usize::MAX >> 1, ..router_config() };
    let local = Local::start(router, node(kv, false), node(kv, false)).await;
    let client = local.client();
    let mut all = Vec::new();
    for (at, (length, choices)) in SHAPES.into_iter().enumerate() {
        let prompt = prompt(&client, 600 + at as u64, length).await;
        let (answers, _) = ask(&client, &prompt, choices).await;
        all.push((prompt, choices, answers));
    }
    local.end().await;
    all
}

/// A second router over the same nodes, which converts nothing.
async fn exact_router(local: &Local, shutdown: &Shutdown) -> SocketAddr {
    let node = |role, address: SocketAddr| StaticNode { role, address: address.to_string() };
    let nodes =
        vec![node(Role::Prefill, local.prefill_grpc), node(Role::Decode, local.decode_grpc)];
    let config = RouterConfig { nodes, local_prefill_max_tokens: 0, ..router_config() };
    let router = RouterApp::build(config, None, shutdown).await.expect("the router starts");
    let address = router.grpc_address();
    tokio::spawn(router.serve(shutdown.clone()));
    let ready = client(address);
    wait::until(READY_WITHIN, "both nodes", || async {
        let status = ready.status().await.map_err(|error| error.to_string())?;
        let ready = status.nodes.iter().filter(|node| node.state == "ready").count();
        if ready == 2 { Ok(()) } else { Err(format!("{ready} are ready")) }
    })
    .await;
    address
}

async fn converted_bytes(local: &Local, prefill: KvDtype, decode: KvDtype) -> f64 {
    let metrics = http::metrics(local.prefill_http).await.expect("the node answers");
    let of_pair = |label: &str, kv| {
        metrics.sum_where("baton_kv_converted_bytes_total", &format!("{label}=\"{kv}\""))
    };
    assert_eq!(of_pair("from", prefill), of_pair("to", decode));
    of_pair("from", prefill)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_differ_stay_apart_unless_all_three_convert() {
    let _alone = alone().await;
    let decode = KvDtype::Int8;
    let expected = alone_answers(decode).await;
    let nobody = Converts { router: false, prefill: false, decode: false };
    for (prefill, converts) in [
        (KvDtype::Bf16, nobody),
        (KvDtype::Bf16, Converts { router: false, ..ALL }),
        (KvDtype::Bf16, Converts { prefill: false, ..ALL }),
        // The prefill node draws first tokens, some of which its decode node would not have drawn.
        (KvDtype::Int4, Converts { decode: false, ..ALL }),
    ] {
        let local = start(prefill, decode, converts).await;
        for (prompt, choices, exact) in &expected {
            let (answers, explain) = ask(&local.client(), prompt, *choices).await;
            assert!(answers == *exact, "{prefill}, {converts:?}: {explain}");
            assert_eq!(explain["kv_converted"], "", "{explain}");
            assert_eq!(explain["prefill_node"], Value::Null, "{explain}");
            if converts.router {
                let events = explain["events"].to_string();
                assert!(events.contains("kv_conversion = true"), "{converts:?}: {explain}");
            } else {
                assert_eq!(explain["reason"], "no_prefill_node", "{explain}");
            }
        }
        local.idle(IDLE_WITHIN).await;
        local.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn converted_kv_serves_its_own_request_and_no_other() {
    let _alone = alone().await;
    for (prefill, decode) in [
        (KvDtype::Bf16, KvDtype::Int8),
        (KvDtype::Int8, KvDtype::Bf16),
        (KvDtype::Bf16, KvDtype::Int4),
        (KvDtype::Int4, KvDtype::Int8),
    ] {
        let expected = alone_answers(decode).await;
        let local = start(prefill, decode, ALL).await;
        let way = format!("{prefill} to {decode}");
        let mut as_exact = 0;
        for (prompt, choices, exact) in &expected {
            let mut firsts = Vec::new();
            for again in [false, true] {
                let (answers, explain) = ask(&local.client(), prompt, *choices).await;
                assert_eq!(explain["reason"], "remote_prefill", "{explain}");
                assert_eq!(explain["kv_converted"], way, "{explain}");
                assert_eq!(explain["cached_at_decode_tokens"], 0, "{explain}");
                // The prefill node finds its own KV again.
                let cached = explain["cached_tokens"].as_u64().expect("it is a number");
                assert_eq!(cached > 0, again, "{explain}");
                firsts.push(answers);
            }
            assert!(firsts[0] == firsts[1], "{way}: the same conversion gives the same answer");
            let equal = firsts[0][0].iter().zip(&exact[0]).take_while(|(a, b)| a == b).count();
            eprintln!("{way}: {equal} of {ANSWER_TOKENS} tokens as exact, {choices} answers");
            as_exact += equal;
        }
        // Four bits cost much; between the others a likeliest token seldom changes.
        let is_coarse = [prefill, decode].contains(&KvDtype::Int4);
        let want = if is_coarse { 1 } else { ANSWER_TOKENS as usize };
        assert!(as_exact >= want, "{way}: {as_exact} tokens are the exact ones");
        assert!(converted_bytes(&local, prefill, decode).await > 0.0);
        local.idle(IDLE_WITHIN).await;
        // The same prompts, exactly: computed at the decode node, and nothing converted is found.
        let shutdown = Shutdown::new();
        let exact_client = client(exact_router(&local, &shutdown).await);
        for (prompt, choices, exact) in &expected {
            for again in [false, true] {
                let (answers, explain) = ask(&exact_client, prompt, *choices).await;
                assert!(answers == *exact, "{way}: {explain}");
                assert_eq!(explain["prefill_node"], Value::Null, "{explain}");
                assert_eq!(explain["kv_converted"], "", "{explain}");
                let cached = explain["cached_tokens"].as_u64().expect("it is a number");
                assert_eq!(cached > 0, again, "{way}: {explain}");
            }
        }
        // Exact blocks that are there need no transfer, whoever prefills the rest.
        let (prompt, choices, _) = &expected[0];
        let (_, explain) = ask(&local.client(), prompt, *choices).await;
        let held = explain["cached_at_decode_tokens"].as_u64().expect("it is a number");
        assert!(held > 0, "{explain}");
        local.idle(IDLE_WITHIN).await;
        shutdown.drain.cancel();
        local.end().await;
    }
}
