//! What comes back: tokens by index, then one reason to end.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// Log-probability of a token that was drawn, and of the likeliest ones beside it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Natural logarithm, of the model's distribution before any sampling parameter.
    pub logprob: f32,
    /// Likeliest first.
    pub top: Vec<(TokenId, f32)>,
}

/// One generated token. A client gets each (choice, index) once and in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenOutput {
    pub choice: u16,
    /// Position in the answer, from 0.
    pub index: u32,
    pub id: TokenId,
    pub logprobs: Option<TokenLogprobs>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-answer token, a stop id or a stop string.
    Stop,
    /// `max_tokens`, or the model's context is full.
    Length,
}

impl FinishReason {
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// Tokens that a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Over all choices.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was reused instead of computed.
    pub cached_tokens: u32,
}
