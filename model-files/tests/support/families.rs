//! Tiny models of every architecture.

use super::{Dtype, Gguf, Meta, Random, Shape};

/// Names of GGUF architectures; `mixtral` and `mistral` stand for `llama` with experts and with a
/// sliding window.
pub const FAMILIES: [&str; 8] =
    ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3"];

/// Shorter than the tests' prompts, and no multiple of anything.
pub const WINDOW: usize = 43;
const EXPERTS: usize = 5;
const USED: usize = 2;

/// A model of `family` with random weights.
pub fn family(family: &str, shape: Shape, dtype: Dtype, seed: u64) -> Gguf {
    let arch = if family.starts_with("mi") { "llama" } else { family };
    let mut file = Gguf::tiny(shape, dtype, seed);
    let mut random = Random(seed.wrapping_mul(31) | 1);
    for (key, value) in &mut file.keys {
        *key = key.replace("llama.", &format!("{arch}."));
        if key == "general.architecture" {
            *value = Meta::Str(arch.into());
        }
    }
    if matches!(family, "mistral" | "gemma3" | "phi3") {
        file.set(&format!("{arch}.attention.sliding_window"), Meta::U32(WINDOW as u32));
    }
    match family {
        "gemma3" => {
            file.set("gemma3.attention.sliding_window_pattern", Meta::U32(2));
            file.set("gemma3.rope.freq_base", Meta::F32(1e6));
        }
        "phi3" => {
            let half = Meta::U32(shape.head_dim as u32 / 2);
            file.set("phi3.rope.dimension_count", half);
        }
        _ => {}
    }
    if family == "mixtral" || family == "qwen3moe" {
        file.set(&format!("{arch}.expert_count"), Meta::U32(EXPERTS as u32));
        file.set(&format!("{arch}.expert_used_count"), Meta::U32(USED as u32));
    }
    for layer in 0..shape.layers {
        change_layer(&mut file, family, &format!("blk.{layer}."), shape, dtype, &mut random);
    }
    file
}

fn change_layer(
    file: &mut Gguf,
    family: &str,
    at: &str,
    shape: Shape,
    dtype: Dtype,
    random: &mut Random,
) {
    let Shape { hidden, ffn, head_dim, .. } = shape;
    let (q, kv) = (shape.heads * head_dim, shape.kv_heads * head_dim);
    let mut add = |file: &mut Gguf, name: &str, dtype, cols, rows| {
        file.add(&format!("{at}{name}"), dtype, cols, rows, random);
    };
    if family == "qwen2" {
        for (name, width) in [("attn_q", q), ("attn_k", kv), ("attn_v", kv)] {
            add(file, &format!("{name}.bias"), Dtype::F32, width, 0);
        }
    }
    if matches!(family, "qwen3" | "qwen3moe" | "gemma3") {
        add(file, "attn_q_norm.weight", Dtype::F32, head_dim, 0);
        add(file, "attn_k_norm.weight", Dtype::F32, head_dim, 0);
    }
    if family == "gemma3" {
        add(file, "post_attention_norm.weight", Dtype::F32, hidden, 0);
        add(file, "post_ffw_norm.weight", Dtype::F32, hidden, 0);
    }
    if family == "mixtral" || family == "qwen3moe" {
        add(file, "ffn_gate_inp.weight", Dtype::F32, hidden, EXPERTS);
        add(file, "ffn_gate_exps.weight", dtype, hidden, ffn * EXPERTS);
        add(file, "ffn_up_exps.weight", dtype, hidden, ffn * EXPERTS);
        add(file, "ffn_down_exps.weight", dtype, ffn, hidden * EXPERTS);
        let dense = ["ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"];
        file.tensors
            .retain(|tensor| !dense.iter().any(|name| tensor.name == format!("{at}{name}")));
    }
    if family == "phi3" {
        let separate =
            ["attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight"];
        file.tensors
            .retain(|tensor| !separate.iter().any(|name| tensor.name == format!("{at}{name}")));
        add(file, "attn_qkv.weight", dtype, hidden, q + 2 * kv);
        add(file, "ffn_up.weight", dtype, hidden, 2 * ffn);
    }
}
