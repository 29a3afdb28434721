//! Weights that give no numbers: the answer says so whichever node finds out, and nobody takes the
//! node for lost, or tries the same at another.

use baton_engine_host::NodeConfig;
use baton_router::RouterConfig;
use baton_tests::ask::{greedy, prompt};
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::{alone, http, paths};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_said_once() {
    let _alone = alone().await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = folder.path().join("damaged.gguf");
    let mut bytes = std::fs::read(paths::model()).expect("the model is there");
    let end = bytes.len();
    // Scales or norms of the last tensor: no numbers, in every format.
    bytes[end - 4_096..].fill(0xff);
    std::fs::write(&model, bytes).expect("a temporary file");
    for local_prefill_max_tokens in [0, usize::MAX >> 1] {
        let router = RouterConfig { local_prefill_max_tokens, ..router_config() };
        let node = || NodeConfig { model: model.clone(), ..node_config() };
        let local = Local::start(router, node(), node()).await;
        let client = local.client();
        let request = greedy(prompt(&client, 81, 200).await, 4);
        let answer = async { client.generate(request).await?.collect().await };
        let error = answer.await.expect_err("no numbers").to_string();
        assert!(error.contains("NaN"), "{local_prefill_max_tokens}: {error}");
        let metrics = http::metrics(local.http).await.expect("the router answers");
        assert_eq!(metrics.sum("baton_recoveries_total"), 0.0);
        local.idle(std::time::Duration::from_secs(5)).await;
        local.end().await;
    }
}
