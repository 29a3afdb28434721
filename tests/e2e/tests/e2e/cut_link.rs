//! The link between a prefill node and the rest is cut amid a transfer: nobody is told, and both
//! ends find it by the silence, free everything, and work together again when it is back.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use baton_client::Client;
use baton_tests::ask::{explained, greedy, prompt};
use baton_tests::cluster::{client, idle};
use baton_tests::cut::CutNetwork;
use baton_tests::process::{Process, Signal};
use baton_tests::{alone, http, paths, ports, wait};
use baton_types::TokenId;
use serde_json::Value;
use tempfile::TempDir;

const PROMPT_TOKENS: usize = 3_000;
const TOKENS: u32 = 12;
/// `peer_silent_ms` is 2 s.
const FOUND_WITHIN: Duration = Duration::from_secs(4);
const READY_WITHIN: Duration = Duration::from_secs(60);
const ANSWER_WITHIN: Duration = Duration::from_secs(120);

/// A router and a decode node here, a prefill node there.
struct Divided {
    router: (Process, SocketAddr),
    decode: (Process, SocketAddr),
    prefill: (Process, SocketAddr),
    // After the processes that use them.
    network: CutNetwork,
    _folder: TempDir,
}

impl Divided {
    async fn start(node_config: &str) -> Self {
        let (network, folder) = (CutNetwork::new(), tempfile::tempdir().expect("a folder"));
        let here = |port| SocketAddr::new(IpAddr::V4(CutNetwork::HERE), port);
        let there = |port| SocketAddr::new(IpAddr::V4(CutNetwork::THERE), port);
        let config = folder.path().join("node.toml");
        std::fs::write(
            &config,
            format!("kv_pool_mib = 256\nprefill_chunk_tokens = 128\n{node_config}"),
        )
        .expect("a file");
        let start_node = |name: &str, mut command: std::process::Command, grpc, http| {
            command.arg("--config").arg(&config).arg(format!("--grpc={grpc}"));
            command.arg(format!("--http={http}")).arg("--model").arg(paths::model());
            command.arg("--threads=1");
            (Process::start(name, folder.path(), &mut command), http)
        };
        let [prefill_grpc, prefill_http] = [0; 2].map(|_| there(ports::free()));
        let far = network.command(&paths::binary("baton-prefill"));
        let prefill = start_node("prefill", far, prefill_grpc, prefill_http);
        let [decode_grpc, decode_http] = [0; 2].map(|_| here(ports::free()));
        let near = std::process::Command::new(paths::binary("baton-decode"));
        let decode = start_node("decode", near, decode_grpc, decode_http);
        let known = folder.path().join("router.toml");
        let node = |role: &str, address| {
            format!("[[nodes]]\nrole = \"{role}\"\naddress = \"{address}\"\n")
        };
        let nodes = node("prefill", prefill_grpc) + &node("decode", decode_grpc);
        std::fs::write(&known, nodes).expect("a file");
        let [router_grpc, router_http] = [0; 2].map(|_| here(ports::free()));
        let mut command = std::process::Command::new(paths::binary("baton-router"));
        command.arg("--config").arg(&known).arg(format!("--grpc={router_grpc}"));
        command.arg(format!("--http={router_http}"));
        let process = Process::start("router", folder.path(), &mut command);
        let router = (process, router_grpc);
        let divided = Self { router, decode, prefill, network, _folder: folder };
        divided.ready().await;
        divided
    }

    fn client(&self) -> Client {
        client(self.router.1)
    }

    async fn ready(&self) {
        let client = self.client();
        wait::until(READY_WITHIN, "both nodes", || async {
            let status = client.status().await.map_err(|error| error.to_string())?;
            let ready = status.nodes.iter().filter(|node| node.state == "ready").count();
            if ready == 2 { Ok(()) } else { Err(format!("{ready} are ready")) }
        })
        .await;
    }

    async fn end(mut self) {
        let parts = [&mut self.router, &mut self.prefill, &mut self.decode];
        for (process, _) in parts {
            process.signal(Signal::Terminate);
            let status = process.exit(Duration::from_secs(20)).await;
            assert!(status.success(), "{} ended with {status}", process.name());
            assert!(!process.log().contains("panicked"), "{}", process.name());
        }
    }
}

async fn ask(client: Client, seed: u64) -> (Vec<TokenId>, Value) {
    let prompt = prompt(&client, seed, PROMPT_TOKENS).await;
    explained(&client, greedy(prompt, TOKENS)).await
}

async fn received(decode: SocketAddr) -> f64 {
    let metrics = http::metrics(decode).await.expect("the decode node answers");
    metrics.sum_where("baton_kv_ucx_bytes_total", "received")
        + metrics.sum("baton_kv_transfer_received_bytes_total")
}

async fn cut_and_mend(node_config: &str, way: &str) {
    let divided = Divided::start(node_config).await;
    // The answers of a whole network.
    let (expected, explain) = ask(divided.client(), 61).await;
    assert_eq!(explain["transport"], way, "{explain}");
    let decode = divided.decode.1;
    let before = received(decode).await;
    let answer = tokio::spawn(ask(divided.client(), 62));
    wait::until(READY_WITHIN, "prefill to begin", || async {
        let metrics = http::metrics(divided.prefill.1).await.map_err(|error| error.to_string())?;
        let running = metrics.sum("baton_engine_requests_running");
        let came = received(decode).await > before;
        if running > 0.0 && (came || way == "grpc") { Ok(()) } else { Err("not yet".into()) }
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    divided.network.cut();
    let since = Instant::now();
    let found = divided.decode.0.says_again("transfer failed", 0, since).await;
    let found_there = divided.prefill.0.says_again("prefill failed", 0, since).await;
    eprintln!("{way}: a cut link was found in {found:?} and, by the sender, in {found_there:?}");
    assert!(found < FOUND_WITHIN && found_there < FOUND_WITHIN, "{found:?}, {found_there:?}");
    let answer = wait::in_time(ANSWER_WITHIN, "the request's end", answer).await;
    let (tokens, explain) = answer.expect("the client does not panic");
    assert_eq!(tokens.len(), TOKENS as usize, "{explain}");
    idle("decode node", decode, Duration::from_secs(5)).await;
    let metrics = http::metrics(decode).await.expect("the decode node answers");
    assert_eq!(metrics.sum("baton_kv_ucx_registered_bytes"), 0.0, "staging memory");

    divided.network.mend();
    divided.ready().await;
    idle("prefill node", divided.prefill.1, Duration::from_secs(5)).await;
    // Computed here and now there: nothing of the first one's is left over.
    let (again, _) = ask(divided.client(), 61).await;
    assert_eq!(again, expected);
    let (other, explain) = ask(divided.client(), 63).await;
    assert_eq!((other.len(), &explain["reason"]), (TOKENS as usize, &"remote_prefill".into()));
    divided.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_link_is_found_by_its_silence() {
    let _alone = alone().await;
    cut_and_mend("kv_transport = \"ucx\"\nucx_tls = \"tcp\"\n", "ucx").await;
    cut_and_mend("kv_transport = \"grpc\"\n", "grpc").await;
}
