//! What the engine counts of a step against formulas over the model's shape.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use baton_engine::backend::{Backend, LogitRows, NoSink, Span, StepCost};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_model_files::ModelFile;
use baton_types::{BlockId, KvDtype, ModelSpec, TokenId};

/// bfloat16, in weights and in KV.
const ELEMENT_BYTES: usize = 2;

fn model(family: &str) -> ModelFile {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families").join(family);
    ModelFile::open(&folder).unwrap()
}

/// Spans of (first position, tokens), each with pages of its own.
fn cost(model: &ModelFile, spans: &[(usize, usize)]) -> StepCost {
    cost_over(KvDtype::Bf16, model, spans)
}

fn cost_over(kv_dtype: KvDtype, model: &ModelFile, spans: &[(usize, usize)]) -> StepCost {
    let config = CpuConfig { threads: 2, max_step_tokens: 512, kv_dtype, ..CpuConfig::default() };
    let mut backend = CpuBackend::new(model, config).unwrap();
    let tokens: Vec<TokenId> = vec![1; 512];
    let blocks: Vec<Vec<BlockId>> =
        (0..spans.len() as u32).map(|i| (i * 40..(i + 1) * 40).map(BlockId).collect()).collect();
    let spans: Vec<Span<'_>> = spans
        .iter()
        .zip(&blocks)
        .map(|(&(first_position, count), blocks)| Span {
            tokens: &tokens[..count],
            first_position,
            blocks,
            logits: LogitRows::Last,
            streaming: None,
        })
        .collect();
    backend.step(&spans, &mut NoSink).unwrap();
    backend.last_cost()
}

/// Weights of a dense layer's matrices.
fn layer_weights(spec: &ModelSpec) -> usize {
    let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    spec.hidden * (2 * q + 2 * kv + 3 * spec.ffn)
}

fn output_weights(spec: &ModelSpec) -> usize {
    spec.vocab.next_multiple_of(32) * spec.hidden
}

fn kv_bytes(spec: &ModelSpec, tokens: usize) -> usize {
    spec.layers * spec.kv_heads * tokens * spec.head_dim * 2 * ELEMENT_BYTES
}

fn attention_flops(spec: &ModelSpec, keys_seen: usize) -> usize {
    4 * spec.layers * spec.heads * spec.head_dim * keys_seen
}

#[test]
fn a_dense_step_costs_what_its_shape_says() {
    let model = model("llama3");
    let spec = model.spec();
    // A chunk of a prompt, and two answers.
    let (chunk, rows) = (100, 102);
    let got = cost(&model, &[(64, chunk), (200, 1), (7, 1)]);
    let keys_seen = (65..=164).sum::<usize>() + 201 + 8;
    let weights = spec.layers * layer_weights(spec);
    let flops = 2 * (rows * weights + 3 * output_weights(spec)) + attention_flops(spec, keys_seen);
    assert_eq!(got.flops, flops as u64);
    assert_eq!(got.weight_bytes, (ELEMENT_BYTES * (weights + output_weights(spec))) as u64);
    assert_eq!(got.dot_ops, 0, "all of it is bfloat16");
    assert_eq!(got.kv_bytes, kv_bytes(spec, 164 + 201 + 8) as u64);
}

#[test]
fn bytes_of_kv_are_read_with_their_scales() {
    let model = model("llama3");
    let spec = model.spec();
    let (spans, tokens) = ([(64, 100), (200, 1)], 164 + 201);
    let (bf16, int8) = (cost(&model, &spans), cost_over(KvDtype::Int8, &model, &spans));
    let scale_bytes = 2;
    let kv_bytes = 2 * spec.layers * spec.kv_heads * tokens * (spec.head_dim + scale_bytes);
    assert_eq!(int8.kv_bytes, kv_bytes as u64);
    assert_eq!((int8.flops, int8.weight_bytes), (bf16.flops, bf16.weight_bytes));
    let keys_seen = (65..=164).sum::<usize>() + 201;
    assert_eq!(int8.dot_ops, attention_flops(spec, keys_seen) as u64 / 2, "scores are dots");
}

#[test]
fn a_window_bounds_what_attention_reads() {
    let model = model("mistral");
    let spec = model.spec();
    let window = spec.features.window.as_ref().unwrap().tokens;
    assert!((0..spec.layers).all(|layer| spec.window(layer).is_some()));
    assert_eq!(cost(&model, &[(300, 1)]).kv_bytes, kv_bytes(spec, window) as u64);
    assert_eq!(cost(&model, &[(300, 8)]).kv_bytes, kv_bytes(spec, window + 7) as u64);
}

#[test]
fn a_mixture_reads_the_experts_that_it_takes() {
    let model = model("mixtral");
    let spec = model.spec();
    let experts = spec.features.experts.unwrap();
    let expert = 3 * spec.hidden * spec.ffn;
    let shared = layer_weights(spec) - expert + spec.hidden * experts.count.next_multiple_of(32);
    let weights = spec.layers * (shared + experts.used * expert) + output_weights(spec);
    let got = cost(&model, &[(0, 1)]);
    assert_eq!(got.weight_bytes, (ELEMENT_BYTES * weights) as u64);
    assert_eq!(got.flops, (2 * weights + attention_flops(spec, 1)) as u64);
}
