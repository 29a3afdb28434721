//! What sets a family's layers apart from Llama's, and what of it is refused.

use baton_types::{Activation, Experts, ModelFamily, ModelFeatures, RopeSpec, SlidingWindow};

use super::config::Config;
use super::rope::Layers;
use crate::ModelFileError;
use crate::spec::MAX_LAYERS;

const KNOWN: [(&str, ModelFamily); 8] = [
    ("LlamaForCausalLM", ModelFamily::Llama),
    ("MistralForCausalLM", ModelFamily::Llama),
    ("MixtralForCausalLM", ModelFamily::Mixtral),
    ("Qwen2ForCausalLM", ModelFamily::Qwen2),
    ("Qwen3ForCausalLM", ModelFamily::Qwen3),
    ("Qwen3MoeForCausalLM", ModelFamily::Qwen3Moe),
    ("Gemma3ForCausalLM", ModelFamily::Gemma3),
    ("Phi3ForCausalLM", ModelFamily::Phi3),
];
const SUPPORTED: &str = "LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, \
                         Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, \
                         Gemma3ForCausalLM, Phi3ForCausalLM";

/// Gemma 3: each sixth layer sees everything, and the others rotate by this base.
const GEMMA3_PATTERN: usize = 6;
const GEMMA3_LOCAL_THETA: f64 = 10_000.0;
/// Gemma 3's and others' default, where `rope_theta` is left out.
const GEMMA3_THETA: f64 = 1_000_000.0;
const MIXTRAL_THETA: f64 = 1_000_000.0;
const THETA: f64 = 10_000.0;

impl Config {
    /// # Errors
    /// For architectures that are not known.
    pub(super) fn family(&self, file: &str) -> Result<ModelFamily, ModelFileError> {
        let found = self.architectures.first().map_or("", String::as_str);
        let known = KNOWN.iter().find(|(name, _)| *name == found);
        known.map(|(_, family)| *family).ok_or_else(|| ModelFileError::Architecture {
            file: file.to_owned(),
            found: found.to_owned(),
            supported: SUPPORTED,
        })
    }

    /// # Errors
    /// For values that would need another computation.
    pub(super) fn features(
        &self,
        file: &str,
        family: ModelFamily,
        rope: &RopeSpec,
    ) -> Result<ModelFeatures, ModelFileError> {
        self.refuse_unsupported(file, family)?;
        let plain = ModelFeatures {
            window: self.window(file, family, rope)?,
            experts: self.experts(file, family)?,
            ..ModelFeatures::default()
        };
        Ok(match family {
            ModelFamily::Llama | ModelFamily::Mixtral | ModelFamily::Phi3 => plain,
            ModelFamily::Qwen2 => ModelFeatures { qkv_bias: true, ..plain },
            ModelFamily::Qwen3 | ModelFamily::Qwen3Moe => ModelFeatures { qk_norm: true, ..plain },
            ModelFamily::Gemma3 => ModelFeatures {
                qk_norm: true,
                post_norms: true,
                norm_offset: 1.0,
                activation: Activation::GeluTanh,
                embedding_scale: Some((self.hidden_size as f32).sqrt()),
                query_scalar: self
                    .query_pre_attn_scalar
                    .filter(|scalar| Some(*scalar) != self.head_dim.map(|dim| dim as f64))
                    .map(|scalar| scalar as f32),
                ..plain
            },
        })
    }

    /// Width of the feed-forward layer, of one expert where there are several.
    pub(super) fn feed_forward_width(&self, family: ModelFamily) -> usize {
        match family {
            ModelFamily::Qwen3Moe => self.moe_intermediate_size.unwrap_or(self.intermediate_size),
            _ => self.intermediate_size,
        }
    }

    /// The base that transformers takes where a configuration has none.
    pub(super) fn default_theta(&self, layers: Layers) -> f64 {
        match (self.architectures.first().map(String::as_str), layers) {
            (_, Layers::Sliding) => GEMMA3_LOCAL_THETA,
            (Some("Gemma3ForCausalLM"), _) => GEMMA3_THETA,
            (Some("MixtralForCausalLM"), _) => MIXTRAL_THETA,
            _ => THETA,
        }
    }

    fn refuse_unsupported(&self, file: &str, family: ModelFamily) -> Result<(), ModelFileError> {
        let refuse = |key: &str, problem: &str| {
            let (file, key) = (file.to_owned(), key.to_owned());
            Err(ModelFileError::KeyValue { file, key, problem: problem.to_owned() })
        };
        if self.attention_bias.unwrap_or(false) {
            return refuse("attention_bias", "biases are not supported");
        }
        if self.mlp_bias.unwrap_or(false) {
            return refuse("mlp_bias", "biases are not supported");
        }
        let (key, act, want) = match family {
            ModelFamily::Gemma3 => {
                ("hidden_activation", &self.hidden_activation, "gelu_pytorch_tanh")
            }
            _ => ("hidden_act", &self.hidden_act, "silu"),
        };
        if act.as_deref().is_some_and(|act| act != want) {
            return refuse(key, &format!("only {want} is supported"));
        }
        let rotated = self.partial_rotary_factor.unwrap_or(1.0);
        if rotated != 1.0 && family != ModelFamily::Phi3 {
            return refuse("partial_rotary_factor", "partial rotation is not supported here");
        }
        if self.quantization_config.is_some() {
            return refuse("quantization_config", "give F32, F16 or BF16 weights, or a GGUF file");
        }
        if self.attn_logit_softcapping.is_some() {
            return refuse("attn_logit_softcapping", "caps are not supported");
        }
        if self.final_logit_softcapping.is_some() {
            return refuse("final_logit_softcapping", "caps are not supported");
        }
        if self.use_bidirectional_attention.unwrap_or(false) {
            return refuse("use_bidirectional_attention", "a token sees only those before it");
        }
        Ok(())
    }

    fn window(
        &self,
        file: &str,
        family: ModelFamily,
        rope: &RopeSpec,
    ) -> Result<Option<SlidingWindow>, ModelFileError> {
        let is_qwen =
            matches!(family, ModelFamily::Qwen2 | ModelFamily::Qwen3 | ModelFamily::Qwen3Moe);
        if is_qwen && !self.use_sliding_window.unwrap_or(false) {
            return Ok(None);
        }
        // More layers are refused afterwards.
        let count = self.num_hidden_layers.min(MAX_LAYERS);
        let layers: Vec<bool> = match (&self.layer_types, family) {
            (Some(types), _) if types.len() >= count => {
                let slides = types[..count].iter().map(|kind| match kind.as_str() {
                    "sliding_attention" => Ok(true),
                    "full_attention" => Ok(false),
                    other => Err(ModelFileError::KeyValue {
                        file: file.to_owned(),
                        key: "layer_types".into(),
                        problem: format!(
                            "{other} is not supported; supported: full_attention, sliding_attention"
                        ),
                    }),
                });
                slides.collect::<Result<_, _>>()?
            }
            (Some(types), _) => {
                return Err(ModelFileError::KeyValue {
                    file: file.to_owned(),
                    key: "layer_types".into(),
                    problem: format!("{} entries for {count} layers", types.len()),
                });
            }
            (None, ModelFamily::Gemma3) => {
                let period = self.sliding_window_pattern.unwrap_or(GEMMA3_PATTERN).max(1);
                (0..count).map(|layer| (layer + 1) % period != 0).collect()
            }
            (None, ModelFamily::Qwen2 | ModelFamily::Qwen3) => {
                let first = self.max_window_layers.unwrap_or(count);
                (0..count).map(|layer| layer >= first).collect()
            }
            (None, _) => vec![true; count],
        };
        if family == ModelFamily::Gemma3 {
            let tokens = self.sliding_window.ok_or_else(|| ModelFileError::MissingKey {
                file: file.to_owned(),
                key: "sliding_window".into(),
            })?;
            let rope = self.rope(file, rope.dim, Layers::Sliding)?;
            return Ok(Some(SlidingWindow { tokens, layers, rope }));
        }
        // A window that the context never fills changes nothing.
        let tokens = self.sliding_window.filter(|tokens| *tokens < self.max_position_embeddings);
        let is_used = layers.contains(&true);
        Ok(tokens.filter(|_| is_used).map(|tokens| SlidingWindow {
            tokens,
            layers,
            rope: rope.clone(),
        }))
    }

    fn experts(&self, file: &str, family: ModelFamily) -> Result<Option<Experts>, ModelFileError> {
        if !matches!(family, ModelFamily::Mixtral | ModelFamily::Qwen3Moe) {
            return Ok(None);
        }
        let missing =
            |key: &str| ModelFileError::MissingKey { file: file.to_owned(), key: key.to_owned() };
        let is_everywhere = self.decoder_sparse_step.is_none_or(|step| step == 1)
            && self.mlp_only_layers.as_ref().is_none_or(Vec::is_empty);
        if !is_everywhere {
            return Err(ModelFileError::KeyValue {
                file: file.to_owned(),
                key: "decoder_sparse_step or mlp_only_layers".into(),
                problem: "layers without experts among others are not supported".into(),
            });
        }
        Ok(Some(Experts {
            count: (self.num_local_experts.or(self.num_experts))
                .ok_or_else(|| missing("num_local_experts"))?,
            used: self.num_experts_per_tok.ok_or_else(|| missing("num_experts_per_tok"))?,
            // Mixtral always does.
            normalize_weights: family == ModelFamily::Mixtral
                || self.norm_topk_prob.unwrap_or(false),
        }))
    }
}
