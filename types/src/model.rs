//! The shape of a model: all that the forward pass needs besides the weights.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// The architecture, by the structure of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelFamily {
    Llama,
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
    /// Width of the feed-forward layer.
    pub ffn: usize,
    pub vocab: usize,
    pub context_tokens: usize,
    pub norm_eps: f32,
    pub rope: RopeSpec,
    /// Whether the output matrix is the embedding matrix.
    pub tied_embeddings: bool,
    pub bos_id: Option<TokenId>,
    /// Every token that ends an answer (end of text, end of turn).
    pub eos_ids: Vec<TokenId>,
}
