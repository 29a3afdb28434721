//! The shape of a model: all that the forward pass needs besides the weights.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// How a file names a model's tensors. What its layers compute is in [`ModelFeatures`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelFamily {
    /// Llama, Mistral and whatever else is built like them.
    Llama,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Gemma3,
    Phi3,
}

/// Rotary position embedding over the first `dim` dimensions of a head, halves rotated against
/// one another (`x[i]` with `x[i + dim/2]`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    pub dim: usize,
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// How frequencies are changed for contexts longer than the trained one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    None,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context_tokens: usize,
    },
}

/// What lets a feed-forward layer's two halves through: `activation(gate) * up`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    #[default]
    Silu,
    /// GELU by its approximation with a hyperbolic tangent.
    GeluTanh,
}

/// Layers in which a token sees only the last few tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlidingWindow {
    /// A token sees itself and the `tokens - 1` before it.
    pub tokens: usize,
    /// Whether layer `i` has the window.
    pub layers: Vec<bool>,
    /// The rotation in these layers.
    pub rope: RopeSpec,
}

/// A mixture of experts in place of each feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    pub count: usize,
    /// How many of them each token takes, those with the largest weights.
    pub used: usize,
    /// Whether the weights of those taken are scaled to a sum of 1.
    pub normalize_weights: bool,
}

/// What layers have that Llama's do not; the default is Llama.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelFeatures {
    /// Q, K and V each have a vector added.
    pub qkv_bias: bool,
    /// Each head of Q and K is normalised before its rotation.
    pub qk_norm: bool,
    /// What attention and the feed-forward layer yield is normalised before it is added.
    pub post_norms: bool,
    /// What is added to the stored weights of every norm.
    pub norm_offset: f32,
    pub activation: Activation,
    /// What embeddings are multiplied with, where it is not 1.
    pub embedding_scale: Option<f32>,
    /// Scores are divided by the root of this, where it is not the size of a head.
    pub query_scalar: Option<f32>,
    pub window: Option<SlidingWindow>,
    pub experts: Option<Experts>,
}

/// Shapes of one decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Served name, e.g. `SmolLM2-135M-Instruct`.
    pub name: String,
    pub family: ModelFamily,
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of the feed-forward layer; of one expert where there are several.
    pub ffn: usize,
    pub vocab: usize,
    pub context_tokens: usize,
    pub norm_eps: f32,
    /// The rotation, but in layers with a sliding window.
    pub rope: RopeSpec,
    /// Whether the output matrix is the embedding matrix.
    pub tied_embeddings: bool,
    pub features: ModelFeatures,
    pub bos_id: Option<TokenId>,
    /// Every token that ends an answer (end of text, end of turn).
    pub eos_ids: Vec<TokenId>,
}

impl ModelSpec {
    /// The sliding window of layer `layer`, if it has one.
    pub fn window(&self, layer: usize) -> Option<&SlidingWindow> {
        self.features.window.as_ref().filter(|window| window.layers[layer])
    }
}
