//! The other end of a transfer dies, stops, or is cut off: how soon that is noticed, that all
//! staging memory comes back, that whoever is left ends well, and the request with its tokens.
//! With the system's UCX, or `BATON_TEST_UCX_LIBRARY`.

use std::time::{Duration, Instant};

use baton_tests::ask::{greedy, prompt};
use baton_tests::cluster::{Cluster, Plan, Role};
use baton_tests::process::Signal;
use baton_tests::{alone, http, wait};
use baton_types::TokenId;
use tokio::task::JoinHandle;

const PROMPT_TOKENS: usize = 3_000;
const TOKENS: u32 = 12;

/// A death closes sockets, and the kernel says so at once.
const KILLED_WITHIN: Duration = Duration::from_millis(200);
/// Whoever is silent is found by that alone: `peer_silent_ms` is 2 s.
const SILENT_WITHIN: Duration = Duration::from_secs(4);
/// Staging memory, after the notice.
const MEMORY_WITHIN: Duration = Duration::from_secs(4);
/// The router has heard by then why a prefill failed.
const BLAMED_WITHIN: Duration = Duration::from_millis(400);
const END_WITHIN: Duration = Duration::from_secs(20);
const ANSWER_WITHIN: Duration = Duration::from_secs(120);
const BEGIN_WITHIN: Duration = Duration::from_secs(60);

/// What the node that is left says when its transfer has failed.
const DECODE_SAYS: &str = "transfer failed";
const PREFILL_SAYS: &str = "prefill failed";

type Answer = JoinHandle<Result<Vec<TokenId>, baton_client::ClientError>>;

async fn ask(cluster: &Cluster, seed: u64) -> Answer {
    let client = cluster.clients().remove(0);
    let request = greedy(prompt(&client, seed, PROMPT_TOKENS).await, TOKENS);
    tokio::spawn(async move {
        let answer = client.generate(request).await?.collect().await?;
        Ok(answer.answers[0].token_ids.clone())
    })
}

async fn received(decode: std::net::SocketAddr) -> f64 {
    let metrics = http::metrics(decode).await.expect("the decode node answers");
    metrics.sum_where("baton_kv_ucx_bytes_total", "received")
}

/// Begins a request and waits until some of its KV is at the decode node.
async fn begin(cluster: &mut Cluster, seed: u64) -> Answer {
    let decode = cluster.part(Role::Decode, 0).http;
    let before = received(decode).await;
    let answer = ask(cluster, seed).await;
    wait::until(BEGIN_WITHIN, "KV over UCX", || async {
        let came = received(decode).await - before;
        if came > 0.0 { Ok(()) } else { Err(format!("{came} bytes")) }
    })
    .await;
    answer
}

/// One of the two ends goes in the way of `signal`, and comes back.
async fn lose(cluster: &mut Cluster, gone: Role, signal: Signal, seed: u64) -> Duration {
    let (left, what) = match gone {
        Role::Prefill => (Role::Decode, DECODE_SAYS),
        _ => (Role::Prefill, PREFILL_SAYS),
    };
    let answer = begin(cluster, seed).await;
    let before = cluster.part(left, 0).process.says(what);
    cluster.part(gone, 0).process.signal(signal);
    let took = cluster.part(left, 0).process.says_again(what, before, Instant::now()).await;
    if gone == Role::Decode {
        nobody_else_is_blamed(cluster).await;
    }
    let decode = cluster.part(Role::Decode, 0).http;
    if gone == Role::Prefill {
        wait::until(MEMORY_WITHIN, "no staging memory", || async {
            let metrics = http::metrics(decode).await.map_err(|error| error.to_string())?;
            let bytes = metrics.sum("baton_kv_ucx_registered_bytes");
            if bytes == 0.0 { Ok(()) } else { Err(format!("{bytes} bytes")) }
        })
        .await;
    }
    let answer = wait::in_time(ANSWER_WITHIN, "the request's end", answer).await;
    let answer = answer.expect("the client does not panic");
    match gone {
        // The decode node computes the prompt itself.
        Role::Prefill => assert_eq!(answer.expect("an answer").len(), TOKENS as usize),
        // There is no other decode node.
        _ => drop(answer),
    }
    cluster.part(gone, 0).process.kill();
    cluster.restart(gone, 0).await;
    cluster.idle(Duration::from_secs(5)).await;
    took
}

/// The prefill node that could not hand over is as good as before for others.
async fn nobody_else_is_blamed(cluster: &Cluster) {
    let client = cluster.clients().remove(0);
    let began = Instant::now();
    while began.elapsed() < BLAMED_WITHIN {
        let status = client.status().await.expect("the router answers");
        let prefill = status.nodes.iter().find(|node| node.role == "prefill").expect("it is known");
        assert_eq!(prefill.state, "ready", "{prefill:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn end_well(cluster: &mut Cluster) {
    for part in &cluster.parts {
        part.process.signal(Signal::Terminate);
    }
    for part in &mut cluster.parts {
        let status = part.process.exit(END_WITHIN).await;
        assert!(status.success(), "{} ended with {status}", part.process.name());
    }
    cluster.assert_no_panics();
}

fn plan(library: &str) -> Plan {
    let config = format!(
        "kv_pool_mib = 256\nkv_transport = \"ucx\"\nucx_library = \"{library}\"\n\
         prefill_chunk_tokens = 128"
    );
    Plan {
        etcd: 0,
        routers: 1,
        prefill: 1,
        decode: 1,
        // Where there is no decode node any more, there is none to wait for.
        router_config: "queue_timeout_ms = 500",
        // A test's plan lives as long as the test.
        node_config: config.leak(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_is_gone_is_noticed_in_time() {
    let _alone = alone().await;
    let library = std::env::var("BATON_TEST_UCX_LIBRARY").unwrap_or_default();
    let mut cluster = Cluster::start(&plan(&library)).await;
    for part in &cluster.parts {
        assert_eq!(part.process.listens_beyond_loopback(), [""; 0], "{}", part.process.name());
    }
    for (seed, gone) in [(71, Role::Prefill), (72, Role::Decode)] {
        let killed = lose(&mut cluster, gone, Signal::Kill, seed).await;
        let stopped = lose(&mut cluster, gone, Signal::Stop, seed + 10).await;
        eprintln!("{library:?}, {gone:?}: killed {killed:?}, stopped {stopped:?}");
        assert!(killed < KILLED_WITHIN, "kill -9 of {gone:?}: {killed:?}");
        assert!(stopped < SILENT_WITHIN, "SIGSTOP of {gone:?}: {stopped:?}");
    }
    end_well(&mut cluster).await;
}
