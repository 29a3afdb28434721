//! A benchmark: of the handoffs of 32 prompts of 2,000 tokens on this machine, what does not hide
//! behind prefill takes at most a twentieth of prefill's time, by the requests' own account, over
//! each transport; and all of them give the same tokens.
//!
//! `cargo test --release -p baton-tests --test e2e transfer_hidden -- --ignored
//! --nocapture`

use baton_client::Client;
use baton_engine_host::{KvTransport, NodeConfig};
use baton_router::RouterConfig;
use baton_tests::alone;
use baton_tests::ask::{explained, greedy, prompt};
use baton_tests::local::{Local, node_config, router_config};
use baton_types::TokenId;

const PROMPT_TOKENS: usize = 2_000;
const REQUESTS: u64 = 32;
const SHARE_MAX: f64 = 0.05;

/// UCX as it finds its way, which inside one machine is the kernel's copy, and over TCP.
const WAYS: [(KvTransport, &str); 3] =
    [(KvTransport::Grpc, ""), (KvTransport::Ucx, ""), (KvTransport::Ucx, "tcp")];

/// The tokens of one request, and its unhidden transfer as a share of its prefill.
async fn ask(client: &Client, seed: u64, way: &str) -> (Vec<TokenId>, f64) {
    let prompt = prompt(client, 500 + seed, PROMPT_TOKENS).await;
    let (tokens, explain) = explained(client, greedy(prompt, 8)).await;
    assert_eq!(explain["transport"], way, "{explain}");
    let us = |phase: &str| explain["phases_us"][phase].as_f64().expect("phases are numbers");
    (tokens, us("transfer_unhidden") / us("prefill"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a benchmark: it wants the machine to itself"]
async fn a_handoff_hides_behind_prefill() {
    let _alone = alone().await;
    let mut tokens: Option<Vec<Vec<TokenId>>> = None;
    for (kv_transport, tls) in WAYS {
        let router = RouterConfig { local_prefill_max_tokens: 0, ..router_config() };
        let node = || NodeConfig { kv_transport, ucx_tls: tls.to_owned(), ..node_config() };
        let local = Local::start(router, node(), node()).await;
        let client = local.client();
        let (mut answers, mut shares) = (Vec::new(), Vec::new());
        for seed in 0..REQUESTS {
            let (ids, share) = ask(&client, seed, kv_transport.as_str()).await;
            answers.push(ids);
            shares.push(share);
        }
        shares.sort_by(f64::total_cmp);
        let median = shares[shares.len() / 2];
        println!(
            "{} {tls}: unhidden {:.2} % of prefill in the median, {:.2} to {:.2} %",
            kv_transport.as_str(),
            100.0 * median,
            100.0 * shares[0],
            100.0 * shares[shares.len() - 1],
        );
        assert!(median <= SHARE_MAX, "{:.1} % of prefill's time", 100.0 * median);
        match &tokens {
            Some(tokens) => assert_eq!(*tokens, answers, "{kv_transport:?} {tls}"),
            None => tokens = Some(answers),
        }
        local.end().await;
    }
}
