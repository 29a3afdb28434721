//! More than there is room for: some wait, some are told when to come back, none gets another
//! answer.

use std::time::Duration;

use baton_client::ClientError;
use baton_engine_host::NodeConfig;
use baton_router::RouterConfig;
use baton_tests::load::{self, Case, Progress};
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::{alone, http, prompts, wait};
use baton_types::ErrorCode;
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

fn short(count: u64) -> Vec<Case> {
    let case = |seed| Case {
        prompt: prompts::text(seed, 15),
        max_tokens: 40,
        temperature: 0.0,
        seed,
        choices: 1,
    };
    (300..300 + count).map(case).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_fit_is_told_when_to_return() {
    let _alone = alone().await;
    let router = RouterConfig { max_running: 4, max_waiting: 4, ..router_config() };
    let local = Local::start(router, node_config(), node_config()).await;
    let running = load::start(&[local.client()], &short(8));
    wait::until(Duration::from_secs(20), "a full queue", || async {
        let metrics = http::metrics(local.http).await.map_err(|error| error.to_string())?;
        let waiting = metrics.sum("baton_router_requests_waiting");
        if waiting == 4.0 { Ok(()) } else { Err(format!("{waiting} wait")) }
    })
    .await;
    let body = json!({"model": "SmolLM2-135M-Instruct", "prompt": "Hi", "max_tokens": 1});
    let reply = http::post_json(local.http, "/v1/completions", &body).await;
    let reply = reply.expect("the router answers");
    assert_eq!(reply.status, 429, "{}", reply.text());
    let after: Option<u64> = reply.header("retry-after").and_then(|after| after.parse().ok());
    assert!(after.is_some_and(|seconds| seconds >= 1), "{:?}", reply.headers);
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    let refused = local.client().generate(short(1)[0].request()).await;
    match refused {
        Err(ClientError::Baton(error)) => {
            assert_eq!(error.code, ErrorCode::ResourceExhausted);
            assert!(error.retry_after_ms.is_some());
        }
        other => panic!("{other:?}"),
    }
    let answers = running.finish().await;
    assert!(answers.iter().all(|answer| answer.ids[0].len() == 40));
    local.idle(Duration::from_secs(1)).await;
    local.end().await;
}

/// A pool for a third of the load: requests wait for blocks, and running ones are preempted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_pool_changes_no_answer() {
    let _alone = alone().await;
    let mut cases = load::mixed(16, 9);
    cases.iter_mut().for_each(|case| case.max_tokens += 60);
    let large = Local::start(router_config(), node_config(), node_config()).await;
    let expected = load::start(&[large.client()], &cases).finish().await;
    large.end().await;
    let tight = NodeConfig { kv_pool_mib: 32, ..node_config() };
    let small = Local::start(router_config(), tight.clone(), tight).await;
    let got = load::start(&[small.client()], &cases).finish().await;
    load::assert_equal(&expected, &got, "a pool of 32 MiB");
    let metrics = http::metrics(small.decode_http).await.expect("the node answers");
    let preempted = metrics.sum("baton_engine_preemptions_total");
    assert!(preempted > 0.0, "the pool was no smaller than the load");
    small.idle(Duration::from_secs(1)).await;
    small.end().await;
}

/// Small requests without end leave no room for a large one, unless some is kept for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_prompt_has_its_turn_among_small_ones() {
    let _alone = alone().await;
    let tight = NodeConfig { kv_pool_mib: 16, ..node_config() };
    let router = RouterConfig { queue_timeout_ms: 20_000, ..router_config() };
    let local = Local::start(router, tight.clone(), tight).await;
    let ended = CancellationToken::new();
    let mut small = JoinSet::new();
    for seed in 0..8 {
        let (client, ended) = (local.client(), ended.clone());
        small.spawn(async move {
            let case =
                |at| Case { prompt: prompts::text(seed * 1_000 + at, 70), ..short(1)[0].clone() };
            let mut answered = 0u64;
            while !ended.is_cancelled() {
                let progress = Progress::default();
                let answer = load::record(&client, &case(answered), &progress).await;
                answer.expect("small ones are answered");
                answered += 1;
            }
            answered
        });
    }
    // The pool is full from here on.
    tokio::time::sleep(Duration::from_secs(2)).await;
    for seed in 0..2 {
        let large = Case { prompt: prompts::text(9_000 + seed, 560), ..short(1)[0].clone() };
        let answer = load::record(&local.client(), &large, &Progress::default()).await;
        assert_eq!(answer.expect("it has its turn").ids[0].len(), 40);
    }
    ended.cancel();
    let answered = small.join_all().await;
    assert!(answered.iter().all(|&answered| answered > 0), "{answered:?}");
    local.idle(Duration::from_secs(1)).await;
    local.end().await;
}
