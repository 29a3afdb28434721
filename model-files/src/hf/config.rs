//! `config.json`.

use std::path::Path;

use baton_types::{ModelSpec, TokenId};
use serde::Deserialize;
use serde_json::Value;

use super::json::{even_null, read_json};
use super::rope::Layers;
use crate::ModelFileError;
use crate::spec::check_spec;

pub(super) const FILE: &str = "config.json";

/// The fields that matter to the forward pass, under their own names.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    #[serde(default)]
    pub(super) architectures: Vec<String>,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) moe_intermediate_size: Option<usize>,
    pub(super) num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    vocab_size: usize,
    pub(super) max_position_embeddings: usize,
    rms_norm_eps: f64,
    pub(super) rope_theta: Option<f64>,
    pub(super) rope_local_base_freq: Option<f64>,
    pub(super) rope_scaling: Option<Value>,
    /// Where transformers 5 keeps the bases and the scaling.
    pub(super) rope_parameters: Option<Value>,
    pub(super) partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    pub(super) hidden_act: Option<String>,
    pub(super) hidden_activation: Option<String>,
    pub(super) attention_bias: Option<bool>,
    pub(super) mlp_bias: Option<bool>,
    pub(super) query_pre_attn_scalar: Option<f64>,
    pub(super) attn_logit_softcapping: Option<f64>,
    pub(super) final_logit_softcapping: Option<f64>,
    pub(super) use_bidirectional_attention: Option<bool>,
    pub(super) use_sliding_window: Option<bool>,
    /// `Some(None)`: there is said to be none.
    #[serde(default, deserialize_with = "even_null")]
    pub(super) sliding_window: Option<Option<usize>>,
    pub(super) sliding_window_pattern: Option<usize>,
    /// What transformers 4 wrote.
    #[serde(rename = "_sliding_window_pattern")]
    pub(super) older_window_pattern: Option<usize>,
    pub(super) max_window_layers: Option<usize>,
    pub(super) layer_types: Option<Vec<String>>,
    /// Mixtral's name of it, and Qwen's before transformers 5.
    pub(super) num_local_experts: Option<usize>,
    pub(super) num_experts: Option<usize>,
    pub(super) num_experts_per_tok: Option<usize>,
    pub(super) norm_topk_prob: Option<bool>,
    pub(super) decoder_sparse_step: Option<usize>,
    pub(super) mlp_only_layers: Option<Vec<usize>>,
    pub(super) quantization_config: Option<Value>,
    bos_token_id: Option<TokenId>,
    eos_token_id: Option<IdOrIds>,
}

/// `2` or `[2, 3]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "a token's id or a list of them is needed")]
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

    /// Whether this is the first of `architectures`.
    pub(super) fn is_a(&self, architecture: &str) -> bool {
        self.architectures.first().is_some_and(|first| first == architecture)
    }

    /// The one value of a number that two keys may name.
    ///
    /// # Errors
    /// Where they differ.
    pub(super) fn agreed<T: Copy + PartialEq + std::fmt::Display>(
        file: &str,
        (key, value): (&str, Option<T>),
        (other_key, other): (&str, Option<T>),
    ) -> Result<Option<T>, ModelFileError> {
        match (value, other) {
            (Some(value), Some(other)) if value != other => Err(ModelFileError::KeyValue {
                file: file.to_owned(),
                key: key.to_owned(),
                problem: format!("{value}, but {other_key} is {other}; leave the wrong one out"),
            }),
            _ => Ok(value.or(other)),
        }
    }

    /// The family's default is untied; a checkpoint without `lm_head` settles it.
    pub(super) fn is_tied(&self, has: impl Fn(&str) -> bool) -> bool {
        self.tie_word_embeddings.unwrap_or(!has("lm_head.weight"))
    }

    pub(super) fn spec(&self, folder: &Path, tied: bool) -> Result<ModelSpec, ModelFileError> {
        let file = folder.join(FILE).display().to_string();
        let family = self.family(&file)?;
        let heads = self.num_attention_heads;
        let head_dim = self.head_dim.or_else(|| self.hidden_size.checked_div(heads)).unwrap_or(0);
        let eos_ids = self.eos_token_id.clone().map_or_else(Vec::new, IdOrIds::into_ids);
        let rope = self.rope(&file, head_dim, Layers::Full)?;
        let spec = ModelSpec {
            name: folder_name(folder),
            family,
            layers: self.num_hidden_layers,
            hidden: self.hidden_size,
            heads,
            kv_heads: self.num_key_value_heads.unwrap_or(heads),
            head_dim,
            ffn: self.feed_forward_width(family),
            vocab: self.vocab_size,
            context_tokens: self.max_position_embeddings,
            norm_eps: self.rms_norm_eps as f32,
            features: self.features(&file, family, &rope)?,
            rope,
            tied_embeddings: tied,
            bos_id: self.bos_token_id,
            eos_ids,
        };
        check_spec(&spec, &file, |field| {
            let key = match field {
                "layers" => "num_hidden_layers",
                "hidden" => "hidden_size",
                "heads" => "num_attention_heads",
                "kv_heads" => "num_key_value_heads",
                "ffn" => "intermediate_size",
                "context_tokens" => "max_position_embeddings",
                "norm_eps" => "rms_norm_eps",
                "rope.theta" => "rope_theta",
                "rope.dim" => "partial_rotary_factor",
                "rope.scaling" => "rope_scaling",
                "window" => "sliding_window",
                "query_scalar" => "query_pre_attn_scalar",
                "experts.count" => "num_local_experts",
                "experts.used" => "num_experts_per_tok",
                "vocab" => "vocab_size",
                same => same,
            };
            key.to_owned()
        })?;
        Ok(spec)
    }
}

fn folder_name(folder: &Path) -> String {
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    full.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}
