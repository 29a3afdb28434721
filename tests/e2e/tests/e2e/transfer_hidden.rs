//! Acceptance 7, a benchmark: of a 2,000-token prompt's handoff on loopback, what does not hide
//! behind prefill takes less than a tenth of prefill's time, by the request's own account.
//!
//! `cargo test --release -p baton-tests --test e2e transfer_hidden -- --ignored
//! --nocapture`

use baton_client::GenerateRequest;
use baton_router::RouterConfig;
use baton_tests::alone;
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::prompts::text;

const PROMPT_TOKENS: usize = 2_000;
const REPEATS: u64 = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a benchmark: it wants the machine to itself"]
async fn a_handoff_hides_behind_prefill() {
    let _alone = alone().await;
    let router = RouterConfig { local_prefill_max_tokens: 0, ..router_config() };
    let local = Local::start(router, node_config(), node_config()).await;
    let client = local.client();
    let mut shares = Vec::new();
    for seed in 0..REPEATS {
        let ids = client.tokenize("", &text(500 + seed, 2_500)).await.expect("ids");
        let request = GenerateRequest::token_ids(ids[..PROMPT_TOKENS].to_vec());
        let request = request.max_tokens(8).temperature(0.0).ignore_eos(true).explain(true);
        let answer = client.generate(request).await.expect("a place").collect().await;
        let done = answer.expect("an answer").done;
        let explain: serde_json::Value =
            serde_json::from_str(&done.explain_json).expect("the explanation is JSON");
        assert!(explain["prefill_node"].is_string(), "{explain}");
        let phases = &explain["phases_us"];
        let us = |phase: &str| phases[phase].as_f64().expect("phases are numbers");
        let (prefill, unhidden) = (us("prefill"), us("transfer_unhidden"));
        shares.push(unhidden / prefill);
        println!(
            "prefill {:.1} ms, transfer not hidden {:.2} ms: {:.2} %; {} bytes",
            prefill / 1e3,
            unhidden / 1e3,
            100.0 * unhidden / prefill,
            explain["transferred_bytes"]
        );
    }
    shares.sort_by(f64::total_cmp);
    let median = shares[shares.len() / 2];
    println!("median share {:.2} %", 100.0 * median);
    assert!(median < 0.1, "{:.1} % of prefill's time", 100.0 * median);
    local.end().await;
}
