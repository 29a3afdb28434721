//! What sets a family's layers apart from Llama's, and what of it is refused.

use baton_types::{Activation, Experts, ModelFamily, ModelFeatures, RopeSpec};

use super::config::Config;
use super::rope::Layers;
use crate::ModelFileError;

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

/// The base of Gemma 3's layers with a window.
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
        match layers {
            Layers::Sliding => GEMMA3_LOCAL_THETA,
            Layers::Full if self.is_a("Gemma3ForCausalLM") => GEMMA3_THETA,
            Layers::Full if self.is_a("MixtralForCausalLM") => MIXTRAL_THETA,
            Layers::Full => THETA,
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
        let local = ("num_local_experts", self.num_local_experts);
        let count = Self::agreed(file, local, ("num_experts", self.num_experts))?;
        Ok(Some(Experts {
            count: count.ok_or_else(|| missing("num_local_experts"))?,
            used: self.num_experts_per_tok.ok_or_else(|| missing("num_experts_per_tok"))?,
            // Mixtral always does.
            normalize_weights: family == ModelFamily::Mixtral
                || self.norm_topk_prob.unwrap_or(false),
        }))
    }
}
