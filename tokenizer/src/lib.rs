//! Text to token ids and back: encoding, incremental decoding, chat templates and stop strings,
//! from a `tokenizer.json` or from the vocabulary of a GGUF file.
//!
//! It owns the border between what a user writes and what controls the model: no text of a user
//! ever becomes a control token. It reads no files and knows nothing of weights.

#![forbid(unsafe_code)]

mod chat;
mod control;
mod decode;
mod error;
mod pieces;
mod source;
mod stop;
mod tokenizer;

pub use chat::{ChatMessage, ChatOptions};
pub use decode::TextDecoder;
pub use error::TokenizerError;
pub use stop::{StopMatcher, StopStep};
pub use tokenizer::Tokenizer;
