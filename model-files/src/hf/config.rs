//! `config.json` of the Llama family.

use std::path::Path;

use baton_types::{ModelFamily, ModelSpec, RopeScaling, RopeSpec, TokenId};
use serde::Deserialize;
use serde_json::Value;

use super::read_json;
use crate::ModelFileError;
use crate::spec::check_spec;

const FILE: &str = "config.json";
const SUPPORTED: &str = "LlamaForCausalLM, MistralForCausalLM";

/// The fields that matter to the forward pass, under their own names.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    #[serde(default)]
    architectures: Vec<String>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    /// Where transformers 5 keeps `rope_theta` and the scaling.
    rope_parameters: Option<Value>,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    sliding_window: Option<usize>,
    quantization_config: Option<Value>,
    partial_rotary_factor: Option<f64>,
    bos_token_id: Option<TokenId>,
    eos_token_id: Option<IdOrIds>,
}

/// `2` or `[2, 3]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum IdOrIds {
    One(TokenId),
    Many(Vec<TokenId>),
}

impl IdOrIds {
    pub(super) fn into_ids(self) -> Vec<TokenId> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl Config {
    pub(super) fn read(folder: &Path) -> Result<Self, ModelFileError> {
        let path = folder.join(FILE);
        read_json(folder, FILE)?.ok_or_else(|| ModelFileError::Open {
            path,
            source: std::io::ErrorKind::NotFound.into(),
        })
    }

    /// The family's default is untied; a checkpoint without `lm_head` settles it.
    pub(super) fn is_tied(&self, has: impl Fn(&str) -> bool) -> bool {
        self.tie_word_embeddings.unwrap_or(!has("lm_head.weight"))
    }

    pub(super) fn spec(&self, folder: &Path, tied: bool) -> Result<ModelSpec, ModelFileError> {
        let file = folder.join(FILE).display().to_string();
        self.refuse_unsupported(&file)?;
        let heads = self.num_attention_heads;
        let head_dim = self.head_dim.or_else(|| self.hidden_size.checked_div(heads)).unwrap_or(0);
        let eos_ids = self.eos_token_id.clone().map_or_else(Vec::new, IdOrIds::into_ids);
        let context = self.max_position_embeddings;
        let spec = ModelSpec {
            name: folder_name(folder),
            family: ModelFamily::Llama,
            layers: self.num_hidden_layers,
            hidden: self.hidden_size,
            heads,
            kv_heads: self.num_key_value_heads.unwrap_or(heads),
            head_dim,
            ffn: self.intermediate_size,
            vocab: self.vocab_size,
            // Within a sliding window full attention and windowed attention are the same.
            context_tokens: self.sliding_window.map_or(context, |window| window.min(context)),
            norm_eps: self.rms_norm_eps as f32,
            rope: self.rope(&file, head_dim)?,
            tied_embeddings: tied,
            bos_id: self.bos_token_id,
            eos_ids,
        };
        check_spec(&spec, &file, |field| match field {
            "layers" => "num_hidden_layers",
            "hidden" => "hidden_size",
            "heads" => "num_attention_heads",
            "kv_heads" => "num_key_value_heads",
            "head_dim" => "head_dim",
            "ffn" => "intermediate_size",
            "context_tokens" => "max_position_embeddings",
            "norm_eps" => "rms_norm_eps",
            "rope.theta" => "rope_theta",
            "rope.dim" | "rope.scaling" => "rope_scaling",
            _ => "vocab_size",
        })?;
        Ok(spec)
    }

    fn refuse_unsupported(&self, file: &str) -> Result<(), ModelFileError> {
        let architecture = self.architectures.first().map_or("", String::as_str);
        if !matches!(architecture, "LlamaForCausalLM" | "MistralForCausalLM") {
            return Err(ModelFileError::Architecture {
                file: file.to_owned(),
                found: architecture.to_owned(),
                supported: SUPPORTED,
            });
        }
        let refuse = |key: &str, problem: &str| {
            let (file, key) = (file.to_owned(), key.to_owned());
            Err(ModelFileError::KeyValue { file, key, problem: problem.to_owned() })
        };
        if self.attention_bias {
            return refuse("attention_bias", "biases are not supported");
        }
        if self.mlp_bias {
            return refuse("mlp_bias", "biases are not supported");
        }
        if self.hidden_act.as_deref().is_some_and(|act| act != "silu") {
            return refuse("hidden_act", "only silu is supported");
        }
        if self.quantization_config.is_some() {
            return refuse("quantization_config", "give F32, F16 or BF16 weights, or a GGUF file");
        }
        if self.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
            return refuse("partial_rotary_factor", "partial rotation is not supported");
        }
        Ok(())
    }

    fn rope(&self, file: &str, head_dim: usize) -> Result<RopeSpec, ModelFileError> {
        let parameters = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let number = |key: &str| parameters?.get(key)?.as_f64();
        let theta = self.rope_theta.or_else(|| number("rope_theta")).unwrap_or(10_000.0);
        let kind = parameters
            .and_then(|p| p.get("rope_type").or_else(|| p.get("type")))
            .map_or(Some("default"), Value::as_str);
        let need = |key: &str| {
            number(key).ok_or_else(|| ModelFileError::MissingKey {
                file: file.to_owned(),
                key: format!("rope_scaling.{key}"),
            })
        };
        let scaling = match kind {
            Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: need("factor")? },
            Some("llama3") => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_context_tokens: need("original_max_position_embeddings")? as usize,
            },
            other => {
                return Err(ModelFileError::KeyValue {
                    file: file.to_owned(),
                    key: "rope_scaling.rope_type".into(),
                    problem: format!("{other:?}; supported: default, linear, llama3"),
                });
            }
        };
        Ok(RopeSpec { dim: head_dim, theta, scaling })
    }
}

fn folder_name(folder: &Path) -> String {
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    full.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}
