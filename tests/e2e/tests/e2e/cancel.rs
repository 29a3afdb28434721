//! A client that goes away, at any stage, over HTTP or gRPC, leaves nothing behind.

use std::time::Duration;

use baton_client::{Client, Event, GenerateStream};
use baton_tests::load::Case;
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::prompts::text;
use baton_tests::{alone, http, wait};
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// `faults.md`, fault 15.
const FREE_WITHIN: Duration = Duration::from_secs(1);

const STAGE_WITHIN: Duration = Duration::from_secs(30);

/// So long that it is handed over, in many steps.
const LONG_WORDS: usize = 1_200;

fn case(seed: u64, words: usize) -> Case {
    Case { prompt: text(seed, words), max_tokens: 1_500, temperature: 0.0, seed, choices: 1 }
}

async fn local() -> Local {
    // Short chunks make the stages long enough to be met.
    let prefill = baton_engine_host::NodeConfig { prefill_chunk_tokens: 32, ..node_config() };
    let router = baton_router::RouterConfig { max_running: 2, ..router_config() };
    Local::start(router, prefill, node_config()).await
}

/// Waits until a metric of a node, or of the router, is above 0.
async fn reached(address: std::net::SocketAddr, metric: &str) {
    wait::until(STAGE_WITHIN, metric, || async {
        let metrics = http::metrics(address).await.map_err(|error| error.to_string())?;
        let value = metrics.sum(metric);
        if value > 0.0 { Ok(()) } else { Err("it is 0".into()) }
    })
    .await;
}

async fn tokens(stream: &mut GenerateStream, count: usize) {
    let read = async {
        for _ in 0..count {
            let event = stream.next().await.expect("the stream goes on");
            assert!(matches!(event.expect("no error"), Event::Token(_)));
        }
    };
    wait::in_time(STAGE_WITHIN, "the first tokens", read).await;
}

/// A request that nobody reads from yet.
fn asked(client: &Client, case: Case) -> JoinHandle<()> {
    let client = client.clone();
    tokio::spawn(async move { client.generate(case.request()).await.map(drop).expect("a place") })
}

fn post(case: &Case, stream: bool) -> Vec<u8> {
    let body = json!({
        "model": "SmolLM2-135M-Instruct", "prompt": case.prompt, "max_tokens": case.max_tokens,
        "temperature": 0, "stream": stream, "ignore_eos": true,
    });
    http::request("POST", "/v1/completions", "application/json", body.to_string().as_bytes())
}

async fn router_is_idle(local: &Local) {
    wait::until(FREE_WITHIN, "an idle router", || async {
        let metrics = http::metrics(local.http).await.map_err(|error| error.to_string())?;
        let held = metrics.sum("baton_router_requests_running")
            + metrics.sum("baton_router_requests_waiting");
        if held == 0.0 { Ok(()) } else { Err(format!("{held} requests")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_client_goes_away_at_every_stage() {
    let _alone = alone().await;
    let local = local().await;
    let client = local.client();
    // While it decodes.
    let mut decoding = client.generate(case(1, 10).request()).await.expect("a place");
    tokens(&mut decoding, 5).await;
    drop(decoding);
    local.idle(FREE_WITHIN).await;
    // While its prompt is computed elsewhere; the client waits for the first token.
    let prefilling = asked(&client, case(2, LONG_WORDS));
    reached(local.prefill_http, "baton_engine_requests_running").await;
    prefilling.abort();
    local.idle(FREE_WITHIN).await;
    // Just after its first token, amid the handoff's last frames.
    let mut handing = client.generate(case(3, 300).request()).await.expect("a place");
    tokens(&mut handing, 1).await;
    drop(handing);
    local.idle(FREE_WITHIN).await;
    // In the router's queue, behind two that run; then those.
    let first = client.generate(case(4, 10).request()).await.expect("a place");
    let second = client.generate(case(5, 10).request()).await.expect("a place");
    let waits = asked(&client, case(6, 10));
    reached(local.http, "baton_router_requests_waiting").await;
    waits.abort();
    drop((first, second));
    local.idle(FREE_WITHIN).await;
    router_is_idle(&local).await;
    // Before anything could happen at all, many times over.
    for at in 0..20 {
        let request = client.generate(case(100 + at, 80).request());
        // Each is dropped a little later than the one before.
        let _dropped = tokio::time::timeout(Duration::from_micros(500 * at), request).await;
    }
    local.idle(FREE_WITHIN).await;
    router_is_idle(&local).await;
    local.end().await;
}

async fn opened(local: &Local, case: &Case, stream: bool) -> TcpStream {
    http::open(local.http, &post(case, stream)).await.expect("the router listens")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http_client_goes_away_at_every_stage() {
    let _alone = alone().await;
    let local = local().await;
    for stream in [true, false] {
        let seed = 20 + 10 * u64::from(stream);
        let mut decoding = opened(&local, &case(seed, 10), stream).await;
        if stream {
            let mut some = [0; 1_024];
            let read = decoding.read(&mut some);
            let read = wait::in_time(STAGE_WITHIN, "the first event", read).await;
            assert!(read.expect("the stream begins") > 0);
        } else {
            reached(local.decode_http, "baton_engine_requests_running").await;
        }
        drop(decoding);
        local.idle(FREE_WITHIN).await;
        let prefilling = opened(&local, &case(seed + 1, LONG_WORDS), stream).await;
        reached(local.prefill_http, "baton_engine_requests_running").await;
        drop(prefilling);
        local.idle(FREE_WITHIN).await;
        let run = [
            opened(&local, &case(seed + 2, 10), stream).await,
            opened(&local, &case(seed + 3, 10), stream).await,
        ];
        let queued = opened(&local, &case(seed + 4, 10), stream).await;
        reached(local.http, "baton_router_requests_waiting").await;
        drop((queued, run));
        local.idle(FREE_WITHIN).await;
        router_is_idle(&local).await;
    }
    local.end().await;
}
