//! What a router needs of a model to turn text into ids and back: it has no model file and gets
//! these from a node.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// Tokenizer and chat template of one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelArtifacts {
    pub tokenizer: TokenizerSource,
    /// Jinja source.
    pub chat_template: Option<String>,
    pub bos_id: Option<TokenId>,
    pub eos_ids: Vec<TokenId>,
    /// Whether the encoder puts `bos_id` before a raw prompt.
    pub add_bos: bool,
}

/// Where the vocabulary comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenizerSource {
    /// The text of a `tokenizer.json`.
    Json(String),
    Gguf(GgufVocab),
}

/// `tokenizer.ggml.*` of a GGUF file, checked for equal lengths and valid ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece scores).
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer's pattern.
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    /// One for each token, or empty.
    pub scores: Vec<f32>,
    /// One for each token, or empty: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused,
    /// 6 byte.
    pub token_types: Vec<i32>,
    /// `left right`, best first; empty for score-based vocabularies.
    pub merges: Vec<String>,
    pub unknown_id: Option<TokenId>,
    pub add_space_prefix: Option<bool>,
}
