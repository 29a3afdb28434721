//! The parts of a tokenizer, made from what a model file holds.

mod gguf;
mod json;
mod merges;
mod pre;

use baton_types::{ModelArtifacts, TokenizerSource};
use tokenizers::Tokenizer as HfTokenizer;

use crate::TokenizerError;
use crate::control::ControlTokens;
use crate::pieces::Pieces;

/// A vocabulary, taken apart into text and control.
pub(crate) struct Vocabulary {
    /// Encodes text; its vocabulary has no control token, so that no text can spell one.
    pub(crate) plain: HfTokenizer,
    /// Encodes text that follows a control token, where that is another matter.
    pub(crate) plain_inner: Option<HfTokenizer>,
    pub(crate) control: ControlTokens,
    pub(crate) pieces: Pieces,
}

impl Vocabulary {
    /// # Errors
    /// For vocabularies that are broken, or of a kind that this build does not know.
    pub(crate) fn from_artifacts(artifacts: &ModelArtifacts) -> Result<Self, TokenizerError> {
        match &artifacts.tokenizer {
            TokenizerSource::Gguf(vocab) => gguf::read(vocab, artifacts),
            TokenizerSource::Json(text) => json::read(text, artifacts),
        }
    }
}
