//! The model's shape from the metadata of its architecture.

use baton_types::ModelSpec;

use super::arch::Arch;
use super::features::{features, feed_forward_width};
use super::header::Gguf;
use super::rope::rope;
use crate::ModelFileError;
use crate::spec::check_spec;

/// Reads and checks the shape; `name` is the name under which the model is served.
///
/// # Errors
/// For unknown architectures, and for keys that are missing, of the wrong type or absurd.
pub(crate) fn read_spec(gguf: &Gguf<'_>, name: &str) -> Result<ModelSpec, ModelFileError> {
    let arch = Arch::of(gguf)?;
    refuse_part(gguf)?;
    let hidden = arch.need_size("embedding_length")?;
    let heads = arch.need_size("attention.head_count")?;
    let head_dim = head_dim(arch, hidden, heads)?;
    let vocab = vocab(arch)?;
    let rope = rope(arch, head_dim)?;
    let spec = ModelSpec {
        name: name.to_owned(),
        family: arch.family,
        layers: arch.need_size("block_count")?,
        hidden,
        heads,
        kv_heads: arch.size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        ffn: feed_forward_width(arch)?,
        vocab,
        context_tokens: arch.need_size("context_length")?,
        norm_eps: arch.need_float("attention.layer_norm_rms_epsilon")? as f32,
        features: features(arch, &rope, hidden, heads)?,
        rope,
        tied_embeddings: !gguf.tensors.contains_key("output.weight"),
        bos_id: gguf.token_id(super::vocab::BOS_KEY, vocab)?,
        eos_ids: super::vocab::eos_ids(gguf, vocab)?,
    };
    check_spec(&spec, gguf.file, |field| {
        arch.key(match field {
            "layers" => "block_count",
            "hidden" => "embedding_length",
            "heads" => "attention.head_count",
            "kv_heads" => "attention.head_count_kv",
            "head_dim" | "query_scalar" => "attention.key_length",
            "ffn" => "feed_forward_length",
            "context_tokens" => "context_length",
            "norm_eps" => "attention.layer_norm_rms_epsilon",
            "rope.theta" => "rope.freq_base",
            "rope.dim" => "rope.dimension_count",
            "rope.scaling" => "rope.scaling.factor",
            "window" => "attention.sliding_window",
            "experts.count" => "expert_count",
            "experts.used" => "expert_used_count",
            _ => "vocab_size",
        })
    })?;
    Ok(spec)
}

/// A file of several has not all of the model's tensors.
fn refuse_part(gguf: &Gguf<'_>) -> Result<(), ModelFileError> {
    let key = "split.count";
    match gguf.size(key)? {
        Some(count) if count > 1 => {
            let problem =
                format!("this is one of {count} files; join them by llama-gguf-split --merge");
            Err(gguf.bad_value(key, problem))
        }
        _ => Ok(()),
    }
}

fn head_dim(arch: Arch<'_>, hidden: usize, heads: usize) -> Result<usize, ModelFileError> {
    if heads == 0 {
        return Err(arch.bad_value("attention.head_count", "a model has at least one".into()));
    }
    let head_dim = arch.size("attention.key_length")?.unwrap_or(hidden / heads);
    let value_key = "attention.value_length";
    match arch.size(value_key)? {
        Some(value_dim) if value_dim != head_dim => {
            Err(arch.bad_value(value_key, format!("{value_dim} differs from {head_dim} of keys")))
        }
        _ => Ok(head_dim),
    }
}

/// The embedding says how many tokens there are; `vocab_size` may not exist.
fn vocab(arch: Arch<'_>) -> Result<usize, ModelFileError> {
    let name = "token_embd.weight";
    let embedding = arch.gguf.tensors.get(name).ok_or_else(|| ModelFileError::MissingTensor {
        file: arch.gguf.file.to_owned(),
        tensor: name.to_owned(),
    })?;
    match arch.size("vocab_size")? {
        Some(vocab) if vocab as u64 != embedding.rows => {
            let problem = format!("{vocab} tokens, but {name} has {} rows", embedding.rows);
            Err(arch.bad_value("vocab_size", problem))
        }
        _ => Ok(embedding.rows as usize),
    }
}
