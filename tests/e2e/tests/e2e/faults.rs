//! Acceptance 5: whatever is killed amid 32 running streams, every stream ends as it does when
//! nothing dies, no token comes twice or is missing, and afterwards nothing is held anywhere.
//!
//! Separate processes on loopback: three etcd members, two routers, two prefill nodes, three
//! decode nodes.

use std::time::Duration;

use baton_tests::cluster::{Cluster, Plan, Role};
use baton_tests::load::{self, Case, Recorded, Running};
use baton_tests::process::Signal;
use baton_tests::{alone, wait};
use baton_types::ErrorCode;

const PLAN: Plan = Plan {
    etcd: 3,
    routers: 2,
    prefill: 2,
    decode: 3,
    router_config: "",
    // A node that stops loses its lease before the routers notice its silence.
    node_config: "kv_pool_mib = 256\nlease_ttl_ms = 2000",
};

/// After the last answer; two cores, ten processes.
const IDLE_WITHIN: Duration = Duration::from_secs(3);

/// Something begins amid the streams within this.
const BEGIN_WITHIN: Duration = Duration::from_secs(60);

/// `node_silent_ms`, and some time for two busy cores.
const FOUND_WITHIN: Duration = Duration::from_secs(5);

/// A cluster, and what it answers when nothing dies.
struct Scene {
    cluster: Cluster,
    cases: Vec<Case>,
    expected: Vec<Recorded>,
}

impl Scene {
    async fn set() -> Self {
        let mut cluster = Cluster::start(&PLAN).await;
        let cases = load::mixed(32, 1);
        let expected = load::start(&cluster.clients(), &cases).finish().await;
        for (case, recorded) in cases.iter().zip(&expected) {
            assert_eq!(recorded.ids[0].len(), case.max_tokens as usize);
        }
        cluster.idle(IDLE_WITHIN).await;
        Self { cluster, cases, expected }
    }

    /// Starts the streams against nodes that have nothing cached.
    async fn streams(&mut self) -> Running {
        self.cluster.restart_nodes().await;
        load::start(&self.cluster.clients(), &self.cases)
    }

    /// Waits until about a third of all tokens has come.
    async fn third(&self, running: &Running) {
        let third = self.cases.iter().map(|case| case.max_tokens as usize).sum::<usize>() / 3;
        wait::until(BEGIN_WITHIN, "a third of the tokens", || async {
            let tokens = running.progress.tokens();
            if tokens >= third { Ok(()) } else { Err(format!("{tokens} of {third}")) }
        })
        .await;
    }

    async fn finish(&mut self, running: Running, what: &str) {
        let began = std::time::Instant::now();
        let got = running.finish().await;
        load::assert_equal(&self.expected, &got, what);
        self.cluster.idle(IDLE_WITHIN).await;
        self.cluster.assert_no_panics();
        eprintln!("{what}: equal; the rest of the streams took {:?}", began.elapsed());
    }

    /// The node of this role that computes most just now.
    async fn busiest(&self, role: Role) -> usize {
        wait::until(BEGIN_WITHIN, "a busy node", || async {
            let mut busiest = (0.0, 0);
            for (at, part) in self.cluster.of(role).enumerate() {
                let metrics = baton_tests::http::metrics(part.http).await;
                let metrics = metrics.map_err(|error| error.to_string())?;
                let running = metrics.sum("baton_engine_requests_running");
                if running > busiest.0 {
                    busiest = (running, at);
                }
            }
            if busiest.0 > 0.0 { Ok(busiest.1) } else { Err("all are idle".into()) }
        })
        .await
    }
}

async fn a_decode_node_is_killed(scene: &mut Scene) {
    let running = scene.streams().await;
    let before = scene.cluster.routers_sum("baton_recoveries_total").await;
    scene.third(&running).await;
    let killed = scene.busiest(Role::Decode).await;
    scene.cluster.part(Role::Decode, killed).process.kill();
    scene.finish(running, "kill -9 of a decode node").await;
    let recovered = scene.cluster.routers_sum("baton_recoveries_total").await - before;
    assert!(recovered >= 3.0, "only {recovered} streams were on the node that died");
    scene.cluster.restart(Role::Decode, killed).await;
}

async fn a_prefill_node_is_killed(scene: &mut Scene) {
    let running = scene.streams().await;
    let before = scene.cluster.routers_sum("baton_prefills_replaced_total").await;
    let killed = scene.busiest(Role::Prefill).await;
    scene.cluster.part(Role::Prefill, killed).process.kill();
    scene.finish(running, "kill -9 of a prefill node").await;
    let replaced = scene.cluster.routers_sum("baton_prefills_replaced_total").await - before;
    assert!(replaced >= 1.0, "no prompt was on the node that died");
    scene.cluster.restart(Role::Prefill, killed).await;
}

async fn the_etcd_leader_is_killed(scene: &mut Scene) {
    let running = scene.streams().await;
    scene.third(&running).await;
    let etcd = scene.cluster.etcd.as_mut().expect("the plan has etcd");
    let leader = etcd.leader().await;
    etcd.kill(leader);
    scene.finish(running, "kill -9 of the etcd leader").await;
    let folder = scene.cluster.folder.path().to_path_buf();
    let etcd = scene.cluster.etcd.as_mut().expect("the plan has etcd");
    etcd.restart(leader, &folder).await;
    scene.cluster.ready().await;
}

async fn a_decode_node_is_stopped(scene: &mut Scene) {
    let running = scene.streams().await;
    scene.third(&running).await;
    let before = scene.cluster.routers_sum("baton_recoveries_total").await;
    let stopped = scene.busiest(Role::Decode).await;
    scene.cluster.part(Role::Decode, stopped).process.signal(Signal::Stop);
    wait::until(FOUND_WITHIN, "the recovery from a stopped node", || async {
        let recovered = scene.cluster.routers_sum("baton_recoveries_total").await - before;
        if recovered >= 3.0 { Ok(()) } else { Err(format!("{recovered} streams have moved")) }
    })
    .await;
    let got = running.finish().await;
    load::assert_equal(&scene.expected, &got, "SIGSTOP of a decode node");
    // What it held, it holds until it runs again; then its own streams are gone.
    scene.cluster.part(Role::Decode, stopped).process.signal(Signal::Continue);
    scene.cluster.idle(Duration::from_secs(15)).await;
    scene.cluster.ready().await;
    scene.cluster.assert_no_panics();
}

/// Its clients get one clear error; what it ran at the nodes is freed; the other one goes on.
async fn a_router_is_killed(scene: &mut Scene) {
    let running = scene.streams().await;
    scene.third(&running).await;
    scene.cluster.part(Role::Router, 0).process.kill();
    for (at, outcome) in running.outcomes().await.into_iter().enumerate() {
        match outcome {
            // Odd ones went through the other router.
            Ok(got) => load::assert_equal(
                std::slice::from_ref(&scene.expected[at]),
                &[got],
                "kill -9 of a router",
            ),
            Err(error) if at % 2 == 0 => assert_eq!(error.code(), ErrorCode::Unavailable),
            Err(error) => panic!("request {at} went through the router that lives: {error}"),
        }
    }
    scene.cluster.idle(IDLE_WITHIN).await;
    scene.cluster.restart(Role::Router, 0).await;
}

/// The last known members serve on.
async fn etcd_goes_away(scene: &mut Scene) {
    let etcd = scene.cluster.etcd.as_mut().expect("the plan has etcd");
    (0..PLAN.etcd).for_each(|member| etcd.kill(member));
    let clients = scene.cluster.clients();
    wait::until(FOUND_WITHIN, "routers that say that their view is stale", || async {
        let stale = scene.cluster.routers_sum("baton_membership_stale").await;
        if stale == 2.0 { Ok(()) } else { Err(format!("{stale} do")) }
    })
    .await;
    let got = load::start(&clients, &scene.cases[..8]).finish().await;
    load::assert_equal(&scene.expected[..8], &got, "without etcd");
    scene.cluster.idle(IDLE_WITHIN).await;
}

/// Faults come one after the other on one cluster: starting it is what takes longest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_end_equal_whatever_is_killed() {
    let _alone = alone().await;
    let mut scene = Scene::set().await;
    a_decode_node_is_killed(&mut scene).await;
    a_prefill_node_is_killed(&mut scene).await;
    the_etcd_leader_is_killed(&mut scene).await;
    a_decode_node_is_stopped(&mut scene).await;
    a_router_is_killed(&mut scene).await;
    etcd_goes_away(&mut scene).await;
    scene.cluster.assert_no_panics();
}
