//! Starts: packed weights are written once, mapped by all, and a node stays within its memory.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use baton_tests::cluster::{Cluster, Plan, Role};
use baton_tests::load;
use baton_tests::process::Process;
use baton_tests::{alone, http, paths, ports, wait};

const READY_WITHIN: Duration = Duration::from_secs(60);

/// Of a node, beside its weights and its KV pool.
const OVERHEAD_BYTES: usize = 150 << 20;

/// A decode node that is ready.
async fn node(name: &str, folder: &Path, model: &Path, flags: &[&str]) -> Process {
    let port = ports::free();
    let mut command = Command::new(paths::binary("baton-decode"));
    command.arg(format!("--model={}", model.display()));
    command.args([format!("--grpc=127.0.0.1:{}", ports::free()), "--threads=2".into()]);
    command.arg(format!("--http=127.0.0.1:{port}")).args(flags);
    command.env("NO_COLOR", "1").env("BATON_KV_POOL_MIB", "16");
    // Whatever pages the temporary folder's file system has.
    command.env("BATON_WEIGHTS_MEMORY", "shared");
    let process = Process::start(name, folder, &mut command);
    wait::until(READY_WITHIN, "a ready node", || async {
        let reply = http::get(([127, 0, 0, 1], port).into(), "/readyz").await;
        let status = reply.map_err(|error| error.to_string())?.status;
        if status == 200 { Ok(()) } else { Err(format!("it answers {status}")) }
    })
    .await;
    process
}

/// The model under another name in `folder`, so that what lies beside it lies there.
fn link(folder: &Path) -> std::path::PathBuf {
    let link = folder.join("model.gguf");
    std::os::unix::fs::symlink(paths::model(), &link).expect("a temporary link");
    link
}

#[tokio::test]
async fn nodes_of_one_machine_share_the_packed_weights() {
    let _alone = alone().await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = link(folder.path());
    let first = node("first", folder.path(), &model, &[]).await;
    assert!(first.log().contains("packed weights were written"), "{}", first.log());
    let packed = folder.path().join("model.gguf.baton-packed");
    let weights = std::fs::metadata(&packed).expect("it was written").len() as usize;
    let second = node("second", folder.path(), &model, &[]).await;
    let third = node("third", folder.path(), &model, &[]).await;
    for node in [&second, &third] {
        assert!(node.log().contains("packed weights are mapped"), "{}", node.log());
        let pages = node.mapped_bytes(".baton-packed");
        // They have held every byte against its checksum. Two at least share each page.
        assert!(pages.resident >= weights * 9 / 10, "{pages:?} of {weights} bytes");
        assert!(pages.proportional <= pages.resident * 11 / 20, "{pages:?} are not shared");
        assert!(node.resident_bytes() <= weights + (16 << 20) + OVERHEAD_BYTES);
    }
    let names = std::fs::read_dir(folder.path()).expect("the folder is there");
    let left = names.filter(|name| {
        let name = name.as_ref().expect("a name").file_name();
        name.to_string_lossy().ends_with(".tmp")
    });
    assert_eq!(left.count(), 0, "a temporary file is left");
}

#[tokio::test]
async fn a_damaged_file_is_told_once_and_mended() {
    let _alone = alone().await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = link(folder.path());
    let packed = folder.path().join("model.gguf.baton-packed");
    std::fs::write(&packed, "no weights").expect("a temporary file");
    let first = node("first", folder.path(), &model, &[]).await;
    let log = first.log();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("are not taken")).collect();
    assert_eq!(told.len(), 1, "{log}");
    assert!(told[0].contains("model.gguf.baton-packed") && told[0].contains("ends after"), "{log}");
    assert!(log.contains("packed weights were written"), "{log}");
}

#[tokio::test]
async fn without_a_cache_nothing_is_written() {
    let _alone = alone().await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = link(folder.path());
    let first = node("first", folder.path(), &model, &["--weights-cache=off"]).await;
    assert!(!first.log().contains("packed weights"), "{}", first.log());
    assert!(!folder.path().join("model.gguf.baton-packed").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_has_served_stays_within_its_memory() {
    const POOL_MIB: usize = 96;
    let _alone = alone().await;
    let plan = Plan {
        etcd: 0,
        routers: 1,
        prefill: 1,
        decode: 1,
        router_config: "",
        node_config: "kv_pool_mib = 96",
    };
    let cluster = Cluster::start(&plan).await;
    load::start(&cluster.clients(), &load::mixed(12, 77)).finish().await;
    let weights = std::fs::metadata(paths::model()).expect("the model is there").len() as usize;
    let most = weights + (POOL_MIB << 20) + OVERHEAD_BYTES;
    for part in cluster.parts.iter().filter(|part| part.role != Role::Router) {
        let resident = part.process.resident_bytes();
        assert!(resident <= most, "{} holds {resident} bytes", part.process.name());
    }
    cluster.assert_no_panics();
}
