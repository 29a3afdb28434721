//! Replays what the fuzzers (`fuzz/`) have collected, on the stable toolchain.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use baton_model_files::ModelFile;
use support::{Dtype, Gguf, Shape};

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

fn inputs(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(entries) = fs::read_dir(corpus(target)) else { return Vec::new() };
    let mut inputs: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect();
    inputs.sort();
    inputs
}

#[test]
fn gguf() {
    for (path, bytes) in inputs("gguf") {
        if let Err(error) = ModelFile::from_gguf_bytes(bytes, "fuzz.gguf") {
            assert!(error.to_string().contains("fuzz.gguf"), "{}: {error}", path.display());
        }
    }
}

#[test]
fn safetensors() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    for (_, bytes) in inputs("safetensors") {
        let zero = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let (config, weights) = bytes.split_at(zero);
        fs::write(folder.path().join("config.json"), config).unwrap();
        let weights = weights.get(1..).unwrap_or_default();
        fs::write(folder.path().join("model.safetensors"), weights).unwrap();
        let _ = ModelFile::open(folder.path());
    }
}

/// Writes the inputs that the fuzzers start from: `cargo test -- --ignored seeds`.
#[test]
#[ignore = "writes into fuzz/corpus"]
fn seeds() {
    let shape = Shape {
        layers: 1,
        hidden: 32,
        heads: 2,
        kv_heads: 1,
        head_dim: 16,
        ffn: 32,
        vocab: 8,
        context: 64,
    };
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.block().0 > 1) {
        // Super-blocks of 256 columns only where the small shape has room for them.
        let (ffn, other) = match dtype.block().0 {
            256 => (256, Dtype::Q8_0),
            _ => (shape.ffn, dtype),
        };
        let dtype_of = |name: &str| if name.contains("ffn_down") { dtype } else { other };
        let bytes = Gguf::mixed(Shape { ffn, ..shape }, 1, dtype_of).to_bytes();
        fs::write(corpus("gguf").join(format!("seed-{dtype:?}")), bytes).unwrap();
    }
    let config = r#"{"architectures":["LlamaForCausalLM"],"hidden_size":32,
        "intermediate_size":32,"num_hidden_layers":1,"num_attention_heads":2,"vocab_size":8,
        "max_position_embeddings":64,"rms_norm_eps":1e-5,"tie_word_embeddings":true}"#;
    let ones = vec![1; 32 * 32 * 2];
    let names = ["input_layernorm", "self_attn.q_proj", "post_attention_layernorm"];
    let views = names.map(|name| {
        let shape = if name.ends_with("norm") { vec![32] } else { vec![32, 32] };
        let bytes = &ones[..2 * shape.iter().product::<usize>()];
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape, bytes);
        (format!("model.layers.0.{name}.weight"), view.unwrap())
    });
    let weights = safetensors::serialize(views, None).unwrap();
    let input = [config.as_bytes(), &[0], &weights].concat();
    fs::write(corpus("safetensors").join("seed-tied"), input).unwrap();
}
