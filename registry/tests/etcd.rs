//! Against real etcd: leases, watch, compaction, loss and return. Needs `etcd` on the path
//! (`make test` installs it).

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_registry::{EtcdConfig, EtcdRegistry, Member, Registration, Registry, Role, View};
use baton_types::{Incarnation, NodeId};
use tokio::sync::watch;

struct Etcd {
    process: Child,
    client_port: u16,
    peer_port: u16,
    data: tempfile::TempDir,
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    listener.local_addr().expect("it is bound").port()
}

fn spawn(data: &Path, client_port: u16, peer_port: u16) -> Child {
    let client = format!("http://127.0.0.1:{client_port}");
    let peer = format!("http://127.0.0.1:{peer_port}");
    Command::new("etcd")
        .args(["--name", "m", "--data-dir"])
        .arg(data)
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("m={peer}")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd is installed: apt-get install etcd-server")
}

impl Etcd {
    fn start() -> Self {
        let (client_port, peer_port) = (free_port(), free_port());
        let data = tempfile::tempdir().expect("a temporary folder");
        let process = spawn(data.path(), client_port, peer_port);
        Self { process, client_port, peer_port, data }
    }

    fn config(&self) -> EtcdConfig {
        EtcdConfig {
            lease_ttl: Duration::from_secs(2),
            ..EtcdConfig::new(vec![format!("http://127.0.0.1:{}", self.client_port)])
        }
    }

    async fn connect(&self) -> EtcdRegistry {
        let began = Instant::now();
        loop {
            match EtcdRegistry::connect(self.config()).await {
                Ok(registry) => return registry,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(15), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn kill(&mut self) {
        self.process.kill().expect("etcd runs");
        self.process.wait().expect("it was ours");
    }

    fn restart(&mut self) {
        self.process = spawn(self.data.path(), self.client_port, self.peer_port);
    }

    async fn client(&self) -> etcd_client::Client {
        etcd_client::Client::connect(&self.config().endpoints, None).await.expect("etcd answers")
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _gone = self.process.wait();
    }
}

fn member(id: &str, incarnation: u64) -> Member {
    Member {
        id: NodeId::new(id),
        role: Role::Decode,
        incarnation: Incarnation(incarnation),
        address: "127.0.0.1:1".into(),
        model: "m".into(),
        fingerprint: "00".into(),
        numerics: "n".into(),
    }
}

async fn until(view: &mut watch::Receiver<View>, what: &str, wanted: impl Fn(&View) -> bool) {
    let found = tokio::time::timeout(Duration::from_secs(20), view.wait_for(|v| wanted(v))).await;
    assert!(matches!(found, Ok(Ok(_))), "not in time: {what}");
}

fn has(view: &View, id: &str) -> bool {
    view.members.contains_key(&NodeId::new(id))
}

/// Whether `a` is there under another incarnation.
fn is_another(view: &View, than: Incarnation) -> bool {
    view.members.get(&NodeId::new("a")).is_some_and(|a| a.incarnation != than)
}

/// `a`, under incarnation 7, and a view that has seen it.
async fn one_member(etcd: &Etcd) -> (EtcdRegistry, watch::Receiver<View>, Registration) {
    let registry = etcd.connect().await;
    let mut view = registry.watch();
    let registration = registry.register(member("a", 7)).await.expect("etcd answers");
    until(&mut view, "a is seen", |v| has(v, "a")).await;
    (registry, view, registration)
}

#[tokio::test(flavor = "multi_thread")]
async fn members_come_leave_and_expire() {
    let etcd = Etcd::start();
    let (one, two) = (etcd.connect().await, etcd.connect().await);
    let mut view = two.watch();
    let a = one.register(member("a", 1)).await.unwrap();
    let b = one.register(member("b", 2)).await.unwrap();
    until(&mut view, "both are seen", |v| has(v, "a") && has(v, "b")).await;
    a.leave().await;
    until(&mut view, "a has left", |v| !has(v, "a") && has(v, "b")).await;
    // A registry that starts later sees the same by its list.
    assert!(has(&etcd.connect().await.watch().borrow(), "b"));
    drop(b);
    until(&mut view, "b has left", |v| v.members.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_view_serves_while_etcd_is_away_and_refreshes_when_it_is_back() {
    let mut etcd = Etcd::start();
    let (_registry, mut view, registration) = one_member(&etcd).await;
    etcd.kill();
    until(&mut view, "stale, and a is still there", |v| v.stale && has(v, "a")).await;
    etcd.restart();
    until(&mut view, "fresh again", |v| !v.stale && has(v, "a")).await;
    registration.leave().await;
    until(&mut view, "a has left", |v| !has(v, "a")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_lease_brings_a_new_incarnation() {
    let etcd = Etcd::start();
    let (_registry, mut view, registration) = one_member(&etcd).await;
    let mut client = etcd.client().await;
    let leases = client.leases().await.unwrap();
    client.lease_revoke(leases.leases()[0].id()).await.unwrap();
    until(&mut view, "a is back as another", |v| is_another(v, Incarnation(7))).await;
    let current = registration.incarnation().get();
    assert_eq!(view.borrow().members[&NodeId::new("a")].incarnation, current);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_is_removed_under_a_living_lease_is_written_again() {
    let etcd = Etcd::start();
    let (_registry, mut view, registration) = one_member(&etcd).await;
    let mut client = etcd.client().await;
    let key = "/baton/v1/members/decode/a";
    let deleted = client.delete(key, None).await.unwrap();
    assert_eq!(deleted.deleted(), 1);
    // The view that is there may be from before.
    until(&mut view, "a is back", |v| is_another(v, Incarnation(7))).await;
    assert_ne!(registration.incarnation().get(), Incarnation(7));
    client.put(key, "not a member", None).await.unwrap();
    let current = registration.incarnation().get();
    until(&mut view, "a is back, as another", |v| is_another(v, current)).await;
}

/// A copied configuration file: both would serve, and only one be asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_belongs_to_one_node_at_a_time() {
    let etcd = Etcd::start();
    let (one, two) = (etcd.connect().await, etcd.connect().await);
    let mut view = one.watch();
    let first = one.register(member("a", 1)).await.unwrap();
    let elsewhere =
        |incarnation| Member { address: "127.0.0.1:2".into(), ..member("a", incarnation) };
    let prefill = Member { role: Role::Prefill, ..elsewhere(2) };
    let (decode, prefill) = tokio::join!(two.register(elsewhere(2)), two.register(prefill));
    for refused in [decode.unwrap_err(), prefill.unwrap_err()] {
        assert!(refused.to_string().starts_with("id: a is a node"), "{refused}");
        assert!(refused.to_string().contains("127.0.0.1:1"), "{refused}");
    }
    // Who comes back to the same address after kill -9 does not wait for his old lease.
    let started = std::time::Instant::now();
    let second = two.register(member("a", 3)).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    // The first, if it lives on, does not take the name back while the second has it.
    let is = |v: &View, wanted: u64| has(v, "a") && !is_another(v, Incarnation(wanted));
    until(&mut view, "the second stands", |v| is(v, 3)).await;
    let ttl = etcd.config().lease_ttl;
    let taken_back = tokio::time::timeout(2 * ttl, view.wait_for(|v| !is(v, 3))).await.is_ok();
    assert!(!taken_back, "{:?}", view.borrow());
    second.leave().await;
    until(&mut view, "the first is back", |v| has(v, "a") && !is(v, 3)).await;
    assert!(is(&view.borrow(), first.incarnation().get().0));
    // A third waits for a name that is being freed.
    let third = tokio::spawn(async move { two.register(elsewhere(4)).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    first.leave().await;
    third.await.unwrap().unwrap();
    until(&mut view, "the third stands", |v| is(v, 4)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compacted_watch_lists_again() {
    let mut etcd = Etcd::start();
    let (_registry, mut view, _registration) = one_member(&etcd).await;
    // While etcd is away from the watcher, others change members and compact.
    etcd.kill();
    until(&mut view, "stale", |v| v.stale).await;
    etcd.restart();
    let mut client = etcd.client().await;
    let put = |id: &str| {
        let value = serde_json::to_vec(&member(id, 1)).unwrap();
        let key = format!("/baton/v1/members/decode/{id}");
        let mut client = client.clone();
        async move {
            loop {
                if let Ok(put) = client.put(key.clone(), value.clone(), None).await {
                    return put.header().unwrap().revision();
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    put("b").await;
    let revision = put("c").await;
    let _may_be_done = client.compact(revision, None).await;
    until(&mut view, "all three are seen", |v| has(v, "a") && has(v, "b") && has(v, "c")).await;
}

#[tokio::test]
async fn an_etcd_that_is_not_there_is_named() {
    let config = EtcdConfig::new(vec![format!("http://127.0.0.1:{}", free_port())]);
    let error = EtcdRegistry::connect(config).await.unwrap_err().to_string();
    assert!(error.contains("127.0.0.1") && error.contains("check"), "{error}");
}
