//! Logits of a tiny model of each family against those of transformers (`golden/families.py`),
//! from safetensors and from GGUF.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use baton_engine::backend::{Backend, LogitRows, NoSink, Span};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_model_files::ModelFile;
use baton_types::{BlockId, TokenId};
use serde::Deserialize;

/// Two float32 computations in different orders, with logits of about 1. transformers keep the
/// angles of rotations in float32, so that they are off by the position times 6e-8 and keys now
/// and then round to another bfloat16: near the start there is next to none of that.
const NEAR_TOLERANCE: f64 = 2e-4;
const TOLERANCE: f64 = 6e-3;
/// Positions that are near; every family's window ends before them.
const NEAR: usize = 100;
/// As transformers do it without rounding K and V: what bfloat16 costs.
const EXACT_TOLERANCE: f64 = 0.15;

#[derive(Deserialize)]
struct Golden {
    tokens: Vec<TokenId>,
    /// Of some positions: as transformers compute them, and with K and V in bfloat16.
    exact: BTreeMap<usize, Vec<f64>>,
    bf16_kv: BTreeMap<usize, Vec<f64>>,
}

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families").join(family)
}

fn logits(model: &ModelFile, tokens: &[TokenId]) -> Vec<f32> {
    let config = CpuConfig {
        threads: 2,
        max_step_tokens: tokens.len(),
        max_logit_rows: tokens.len(),
        ..CpuConfig::default()
    };
    let mut backend = CpuBackend::new(model, config).unwrap();
    let blocks: Vec<BlockId> = (0..tokens.len().div_ceil(16) as u32).map(BlockId).collect();
    let logits = LogitRows::All;
    let span = Span { tokens, first_position: 0, blocks: &blocks, logits, streaming: None };
    backend.step(&[span], &mut NoSink).unwrap().to_vec()
}

fn largest_difference(got: &[f32], want: &BTreeMap<usize, Vec<f64>>, rows: Range<usize>) -> f64 {
    let mut worst = 0.0f64;
    for (row, want) in want.range(rows) {
        let got = &got[row * want.len()..][..want.len()];
        for (got, want) in got.iter().zip(want) {
            let apart = (f64::from(*got) - want).abs();
            worst = if apart.is_nan() { f64::INFINITY } else { worst.max(apart) };
        }
    }
    worst
}

fn check(family: &str) {
    let folder = folder(family);
    let golden = std::fs::read_to_string(folder.join("golden.json")).unwrap();
    let golden: Golden = serde_json::from_str(&golden).unwrap();
    let model = ModelFile::open(&folder).unwrap();
    let got = logits(&model, &golden.tokens);
    let near = largest_difference(&got, &golden.bf16_kv, 0..NEAR + 1);
    let all = largest_difference(&got, &golden.bf16_kv, 0..golden.tokens.len());
    let exact = largest_difference(&got, &golden.exact, 0..golden.tokens.len());
    eprintln!("{family}: {near:.1e} near, {all:.1e} in all, {exact:.1e} if nothing is rounded");
    assert!(near < NEAR_TOLERANCE, "{family}: the first logits differ by up to {near}");
    assert!(all < TOLERANCE, "{family}: logits differ by up to {all}");
    assert!(exact < EXACT_TOLERANCE, "{family}: logits differ by up to {exact} from exact ones");

    let gguf = ModelFile::open(folder.join("model.gguf")).unwrap();
    let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&logits(&gguf, &golden.tokens)), bits(&got), "{family}: GGUF differs");
}

#[test]
fn llama_3_with_scaled_rotation() {
    check("llama3");
}

#[test]
fn mistral_with_a_sliding_window() {
    check("mistral");
}

#[test]
fn qwen2_with_biases() {
    check("qwen2");
}

#[test]
fn qwen3_with_normalised_heads() {
    check("qwen3");
}

#[test]
fn gemma3_with_local_and_global_layers() {
    check("gemma3");
}

#[test]
fn phi3_with_fused_tensors() {
    check("phi3");
}

#[test]
fn mixtral_with_experts() {
    check("mixtral");
}

#[test]
fn qwen3moe_with_experts() {
    check("qwen3moe");
}
