//! The model's shape from `llama.*` metadata (Llama and Mistral).

use baton_types::{ModelFamily, ModelSpec, RopeScaling, RopeSpec};

use super::header::Gguf;
use crate::spec::{check_spec, llama3_factor};
use crate::{ModelFileError, TensorDtype};

const SUPPORTED: &str = "llama (Llama, SmolLM2, Mistral)";

/// How far a file's frequency factors may lie from Llama 3's formula.
const FACTOR_TOLERANCE: f64 = 1e-3;

/// Reads and checks the shape; `name` is the name under which the model is served.
///
/// # Errors
/// For other architectures, and for keys that are missing, of the wrong type or absurd.
pub(crate) fn llama_spec(gguf: &Gguf<'_>, name: &str) -> Result<ModelSpec, ModelFileError> {
    let key = "general.architecture";
    let architecture = gguf.text(key)?.ok_or_else(|| gguf.missing(key))?;
    if architecture != "llama" {
        return Err(ModelFileError::Architecture {
            file: gguf.file.to_owned(),
            found: architecture.to_owned(),
            supported: SUPPORTED,
        });
    }
    refuse_experts(gguf)?;
    let hidden = gguf.need_size("llama.embedding_length")?;
    let heads = gguf.need_size("llama.attention.head_count")?;
    let head_dim = head_dim(gguf, hidden, heads)?;
    let eps_key = "llama.attention.layer_norm_rms_epsilon";
    let vocab = vocab(gguf)?;
    let spec = ModelSpec {
        name: name.to_owned(),
        family: ModelFamily::Llama,
        layers: gguf.need_size("llama.block_count")?,
        hidden,
        heads,
        kv_heads: gguf.size("llama.attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        ffn: gguf.need_size("llama.feed_forward_length")?,
        vocab,
        context_tokens: context_tokens(gguf)?,
        norm_eps: gguf.float(eps_key)?.ok_or_else(|| gguf.missing(eps_key))? as f32,
        rope: rope(gguf, head_dim)?,
        tied_embeddings: !gguf.tensors.contains_key("output.weight"),
        bos_id: gguf.token_id("tokenizer.ggml.bos_token_id", vocab)?,
        eos_ids: super::vocab::eos_ids(gguf, vocab)?,
    };
    check_spec(&spec, gguf.file, |field| match field {
        "layers" => "llama.block_count",
        "hidden" => "llama.embedding_length",
        "heads" => "llama.attention.head_count",
        "kv_heads" => "llama.attention.head_count_kv",
        "head_dim" => "llama.attention.key_length",
        "ffn" => "llama.feed_forward_length",
        "context_tokens" => "llama.context_length",
        "norm_eps" => "llama.attention.layer_norm_rms_epsilon",
        "rope.theta" => "llama.rope.freq_base",
        "rope.dim" => "llama.rope.dimension_count",
        "rope.scaling" => "llama.rope.scaling.factor",
        _ => "llama.vocab_size",
    })?;
    Ok(spec)
}

fn refuse_experts(gguf: &Gguf<'_>) -> Result<(), ModelFileError> {
    let key = "llama.expert_count";
    match gguf.size(key)? {
        None | Some(0) => Ok(()),
        Some(count) => {
            Err(gguf.bad_value(key, format!("mixtures of experts ({count}) are not supported")))
        }
    }
}

fn head_dim(gguf: &Gguf<'_>, hidden: usize, heads: usize) -> Result<usize, ModelFileError> {
    let key = "llama.attention.key_length";
    let head_dim = match gguf.size(key)? {
        Some(head_dim) => head_dim,
        None if heads == 0 => 0,
        None => hidden / heads,
    };
    let value_key = "llama.attention.value_length";
    match gguf.size(value_key)? {
        Some(value_dim) if value_dim != head_dim => {
            Err(gguf.bad_value(value_key, format!("{value_dim} differs from {head_dim} of keys")))
        }
        _ => Ok(head_dim),
    }
}

/// The embedding says how many tokens there are; `llama.vocab_size` may not exist.
fn vocab(gguf: &Gguf<'_>) -> Result<usize, ModelFileError> {
    let name = "token_embd.weight";
    let embedding = gguf.tensors.get(name).ok_or_else(|| ModelFileError::MissingTensor {
        file: gguf.file.to_owned(),
        tensor: name.to_owned(),
    })?;
    let key = "llama.vocab_size";
    match gguf.size(key)? {
        Some(vocab) if vocab as u64 != embedding.rows => {
            Err(gguf
                .bad_value(key, format!("{vocab} tokens, but {name} has {} rows", embedding.rows)))
        }
        _ => Ok(embedding.rows as usize),
    }
}

/// Within a sliding window full attention and windowed attention are the same.
fn context_tokens(gguf: &Gguf<'_>) -> Result<usize, ModelFileError> {
    let context = gguf.need_size("llama.context_length")?;
    let window = gguf.size("llama.attention.sliding_window")?.filter(|window| *window > 0);
    Ok(window.map_or(context, |window| window.min(context)))
}

fn rope(gguf: &Gguf<'_>, head_dim: usize) -> Result<RopeSpec, ModelFileError> {
    let dim_key = "llama.rope.dimension_count";
    let dim = gguf.size(dim_key)?.unwrap_or(head_dim);
    if dim != head_dim {
        let problem = format!("{dim} of {head_dim} dimensions: partial rotation in GGUF's order");
        return Err(gguf.bad_value(dim_key, format!("{problem} is not supported")));
    }
    let theta = gguf.float("llama.rope.freq_base")?.unwrap_or(10_000.0);
    Ok(RopeSpec { dim, theta, scaling: rope_scaling(gguf, dim, theta)? })
}

fn rope_scaling(gguf: &Gguf<'_>, dim: usize, theta: f64) -> Result<RopeScaling, ModelFileError> {
    if let Some(scaling) = llama3_scaling(gguf, dim, theta)? {
        return Ok(scaling);
    }
    let key = "llama.rope.scaling.type";
    let factor_key = "llama.rope.scaling.factor";
    match gguf.text(key)? {
        None | Some("none") => Ok(RopeScaling::None),
        Some("linear") => {
            let factor = gguf.float(factor_key)?.ok_or_else(|| gguf.missing(factor_key))?;
            Ok(RopeScaling::Linear { factor })
        }
        Some(other) => Err(gguf.bad_value(
            key,
            format!("{other:?} is not supported; supported: none, linear, and Llama 3's"),
        )),
    }
}

/// GGUF carries Llama 3's scaling as divisors of the frequencies, `rope_freqs.weight[dim / 2]`;
/// its parameters are found again from them.
fn llama3_scaling(
    gguf: &Gguf<'_>,
    dim: usize,
    theta: f64,
) -> Result<Option<RopeScaling>, ModelFileError> {
    let name = "rope_freqs.weight";
    let Some(tensor) = gguf.tensors.get(name) else { return Ok(None) };
    let (want, got) = (vec![1, dim as u64 / 2], vec![tensor.rows, tensor.cols]);
    if want != got {
        let (file, tensor) = (gguf.file.to_owned(), name.to_owned());
        return Err(ModelFileError::TensorShape { file, tensor, want, got });
    }
    if tensor.dtype != TensorDtype::F32 {
        let found = format!("{:?} (F32 is needed)", tensor.dtype);
        let (file, tensor) = (gguf.file.to_owned(), name.to_owned());
        return Err(ModelFileError::TensorType { file, tensor, found });
    }
    let factors: Vec<f64> = gguf.bytes[tensor.bytes.clone()]
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f64::from(f32::from_le_bytes(*bytes)))
        .collect();
    let factor = factors.iter().copied().fold(1.0, f64::max);
    let original_key = "llama.rope.scaling.original_context_length";
    let original_context_tokens = gguf.size(original_key)?.unwrap_or(8192);
    let fits = factors.iter().enumerate().all(|(i, &found)| {
        let want = llama3_factor(i, dim, theta, factor, 1.0, 4.0, original_context_tokens);
        (found / want - 1.0).abs() < FACTOR_TOLERANCE
    });
    if !fits {
        return Err(ModelFileError::TensorRange {
            file: gguf.file.to_owned(),
            tensor: name.to_owned(),
            problem: "its factors are not those of Llama 3's scaling (1, 4, 8192), the only \
                      ones supported"
                .into(),
        });
    }
    Ok(Some(RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context_tokens,
    }))
}
