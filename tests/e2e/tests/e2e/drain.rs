//! SIGTERM of each role amid streams: what runs ends or moves, and the process ends with 0.

use std::time::Duration;

use baton_tests::cluster::{Cluster, Plan, Role};
use baton_tests::load::{self, Running};
use baton_tests::process::Signal;
use baton_tests::{alone, paths, wait};

const PLAN: Plan = Plan {
    etcd: 1,
    routers: 2,
    prefill: 2,
    decode: 2,
    router_config: "",
    node_config: "kv_pool_mib = 256",
};

const POOL_BYTES: usize = 256 << 20;

/// Of a node, beside its weights and its KV pool.
const OVERHEAD_BYTES: usize = 150 << 20;

const ENDS_WITHIN: Duration = Duration::from_secs(40);

async fn begun(running: &Running, tokens: usize) {
    wait::until(Duration::from_secs(60), "the first tokens", || async {
        let come = running.progress.tokens();
        if come >= tokens { Ok(()) } else { Err(format!("{come} of {tokens}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_when_a_role_is_told_to_end() {
    let _alone = alone().await;
    let mut cluster = Cluster::start(&PLAN).await;
    for (round, role) in [Role::Prefill, Role::Decode, Role::Router].into_iter().enumerate() {
        // New prompts in each round: what is cached is not handed over.
        let cases = load::mixed(12, 20 + round as u64);
        let running = load::start(&cluster.clients(), &cases);
        begun(&running, if role == Role::Prefill { 1 } else { 60 }).await;
        let part = cluster.part(role, 0);
        part.process.signal(Signal::Terminate);
        let ended = part.process.exit(ENDS_WITHIN).await;
        assert!(ended.success(), "the {role:?} ended with {ended}");
        let got = running.finish().await;
        cluster.restart(role, 0).await;
        let again = load::start(&cluster.clients(), &cases).finish().await;
        load::assert_equal(&again, &got, &format!("SIGTERM of a {role:?}"));
        cluster.idle(Duration::from_secs(3)).await;
    }
    let weights = std::fs::metadata(paths::model()).expect("the model is there").len() as usize;
    for part in cluster.parts.iter().filter(|part| part.role != Role::Router) {
        let resident = part.process.resident_bytes();
        let most = weights + POOL_BYTES + OVERHEAD_BYTES;
        assert!(resident <= most, "{} holds {resident} bytes", part.process.name());
    }
    cluster.assert_no_panics();
}
