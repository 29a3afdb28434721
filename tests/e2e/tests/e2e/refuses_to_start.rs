//! Processes that cannot serve say why, in one message, and end.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use baton_tests::process::Process;
use baton_tests::{alone, paths, ports};

/// Runs a binary to its own end.
async fn run(binary: &str, arguments: &[&str]) -> (bool, String) {
    let _alone = alone().await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(paths::binary(binary));
    command.args(arguments).env("NO_COLOR", "1");
    let mut process = Process::start(binary, folder.path(), &mut command);
    let status = process.exit(Duration::from_secs(20)).await;
    (status.success(), process.log())
}

fn listening() -> [String; 2] {
    ["grpc", "http"].map(|name| format!("--{name}=127.0.0.1:{}", ports::free()))
}

fn file(folder: &Path, name: &str, bytes: &[u8]) -> String {
    let path = folder.join(name);
    std::fs::write(&path, bytes).expect("a temporary file");
    path.display().to_string()
}

/// The log must hold one error that says all of `says`, and tell of no panic.
fn assert_says(what: &str, (success, log): &(bool, String), says: &[&str]) {
    assert!(!success, "{what} ended well:\n{log}");
    assert!(!log.contains("panicked"), "{what}:\n{log}");
    let errors = log.lines().filter(|line| line.starts_with("Error:")).count();
    assert_eq!(errors, 1, "{what}:\n{log}");
    for word in says {
        assert!(log.contains(word), "{what} does not say {word:?}:\n{log}");
    }
}

/// The model, but that its tokenizer is of a kind that nobody knows.
fn of_another_pre_tokenizer(mut model: Vec<u8>) -> Vec<u8> {
    let find = |from: usize, what: &[u8]| {
        let at = model[from..].windows(what.len()).position(|window| window == what);
        from + at.expect("the model has it")
    };
    let value = find(find(0, b"tokenizer.ggml.pre"), b"smollm");
    model[value..][..6].copy_from_slice(b"smxllm");
    model
}

#[tokio::test]
async fn a_model_that_is_broken() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let whole = std::fs::read(paths::model()).expect("the model is there");
    let mut wrong_magic = whole[..4_096].to_vec();
    wrong_magic[0] = b'X';
    for (name, bytes) in [
        ("cut.gguf", &whole[..whole.len() / 2]),
        ("head.gguf", &whole[..100]),
        ("magic.gguf", &wrong_magic[..]),
        ("empty.gguf", &[][..]),
    ] {
        let model = format!("--model={}", file(folder.path(), name, bytes));
        let [grpc, http] = listening();
        for binary in ["baton-decode", "baton-prefill"] {
            let ended = run(binary, &[&model, &grpc, &http]).await;
            assert_says(&format!("{binary} on {name}"), &ended, &[name]);
        }
    }
    let [grpc, http] = listening();
    let other = of_another_pre_tokenizer(whole);
    let model = format!("--model={}", file(folder.path(), "pre.gguf", &other));
    let ended = run("baton-decode", &[&model, &grpc, &http]).await;
    assert_says("an unknown tokenizer", &ended, &["pre.gguf", "tokenizer", "smxllm"]);
    let ended = run("baton-decode", &["--model=/no/such.gguf", &grpc, &http]).await;
    assert_says("a model that is missing", &ended, &["/no/such.gguf"]);
    let ended = run("baton-decode", &[&grpc, &http]).await;
    assert_says("no model", &ended, &["--model"]);
}

#[tokio::test]
async fn a_configuration_that_is_wrong() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let misspelt = file(folder.path(), "a.toml", b"block_tokens = 24\nkv_pol_mib = 5\n");
    let ended = run("baton-decode", &["--config", &misspelt, "--model=x"]).await;
    assert_says("an unknown key", &ended, &["kv_pol_mib"]);
    let wrong = file(folder.path(), "b.toml", b"block_tokens = 24\nmax_sequences = 0\n");
    let ended = run("baton-decode", &["--config", &wrong, "--model=x"]).await;
    assert_says("two wrong values", &ended, &["block_tokens", "max_sequences"]);
    let too_much = file(folder.path(), "d.toml", b"max_sequences = 9999999999\nid = \"a b\"\n");
    let ended = run("baton-decode", &["--config", &too_much, "--model=x"]).await;
    assert_says("too much", &ended, &["max_sequences", "65536", "id: \"a b\""]);
    for nowhere in ["0.0.0.0:7", "[::]:7", "127.0.0.1:0"] {
        let line = format!("advertise = \"{nowhere}\"\n");
        let nobody = file(folder.path(), "f.toml", line.as_bytes());
        let ended = run("baton-decode", &["--config", &nobody, "--model=x"]).await;
        assert_says("an address of nobody", &ended, &["advertise", nowhere, "reach"]);
    }
    let too_long = file(folder.path(), "e.toml", b"default_deadline_ms = 86400001\n");
    let ended = run("baton-router", &["--config", &too_long]).await;
    assert_says("too long", &ended, &["default_deadline_ms", "86400000"]);
    let no_toml = file(folder.path(), "c.toml", b"= =");
    assert_says("no TOML", &run("baton-router", &["--config", &no_toml]).await, &[]);
    let absent = run("baton-router", &["--config", "/no/such.toml"]).await;
    assert_says("no file", &absent, &["/no/such.toml"]);
}

#[tokio::test]
async fn a_port_that_is_taken() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    let grpc = format!("--grpc={}", taken.local_addr().expect("it is bound"));
    let [_, http] = listening();
    let ended = run("baton-router", &[&grpc, &http]).await;
    assert_says("a taken port", &ended, &[&grpc["--grpc=".len()..], "listened on"]);
}

#[test]
fn help_has_an_example() {
    for binary in ["baton", "baton-router", "baton-prefill", "baton-decode"] {
        let run = Command::new(paths::binary(binary)).arg("--help").output();
        let Output { status, stdout, .. } = run.expect("the binary runs");
        assert!(status.success());
        let help = String::from_utf8_lossy(&stdout).into_owned();
        assert!(binary == "baton" || help.contains("Example:"), "{binary}:\n{help}");
    }
}
