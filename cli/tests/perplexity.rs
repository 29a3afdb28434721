//! `baton eval perplexity` against what `llama-perplexity -c 512` gives for the same file and text.
//! Needs the model in models/ (`make model`) and Debian's copy of the GPL.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const TEXT: &str = "/usr/share/common-licenses/GPL-3";
const LLAMA_CPP: f64 = 18.39;

fn model() -> PathBuf {
    let model =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(model.exists(), "the model is missing: make model");
    model
}

#[test]
fn the_shipped_model_scores_as_llama_cpp_says() {
    let model = model();
    if !Path::new(TEXT).exists() {
        eprintln!("skipped: {TEXT} is not on this machine");
        return;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["eval", "perplexity", "--text", TEXT, "--context", "512", "--json", "--model"])
        .arg(model)
        .output()
        .expect("baton was built");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let score: Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
    let perplexity = score["perplexity"].as_f64().expect("a number");
    assert!((perplexity / LLAMA_CPP - 1.0).abs() < 0.005, "{perplexity} against {LLAMA_CPP}");
    assert!(score["tokens"].as_u64().is_some_and(|tokens| tokens > 5_000));
}

#[test]
fn what_cannot_be_scored_is_named() {
    let model = model();
    let model = model.to_str().expect("a path that is text");
    let cases = [
        ("no/such.gguf", TEXT, "no/such.gguf"),
        (model, "no/such.txt", "no/such.txt"),
        (model, model, "is not UTF-8"),
        (model, "/dev/zero", "more than 256 MiB"),
    ];
    for (model, text, wanted) in cases {
        let output = Command::new(env!("CARGO_BIN_EXE_baton"))
            .args(["eval", "perplexity", "--model", model, "--text", text])
            .output()
            .expect("baton was built");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains(wanted), "{text}: {message}");
    }
}
