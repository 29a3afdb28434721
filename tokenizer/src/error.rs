//! What can go wrong, named by cause.

use baton_types::{Error, ErrorCode};

/// Why a tokenizer could not be built, or a conversation not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// `tokenizer.ggml.model` is neither `gpt2` nor `llama`.
    #[error("vocabularies of kind `{model}` are not supported; known are `gpt2` and `llama`")]
    UnknownVocabulary { model: String },
    /// `tokenizer.ggml.pre` names a pattern that this build does not have.
    #[error("pre-tokenizer `{name}` is not known; known are {known}")]
    UnknownPreTokenizer { name: String, known: String },
    /// The vocabulary contradicts itself.
    #[error("the vocabulary cannot be used: {problem}")]
    BadVocabulary { problem: String },
    /// A `tokenizer.json` with a model, decoder or token that this build cannot honour.
    #[error("tokenizer.json is not supported: {problem}")]
    UnsupportedJson { problem: String },
    #[error("the model has no chat template; send a prompt instead of messages")]
    NoChatTemplate,
    /// The template does not parse: no conversation can be rendered.
    #[error(
        "the model's chat template cannot be used; send a prompt instead of messages: {problem}"
    )]
    UnusableTemplate { problem: String },
    /// The template fails, or refuses the conversation by `raise_exception`.
    #[error("the model's chat template cannot render these messages: {problem}")]
    Template { problem: String },
    /// A bound on time or memory was reached.
    #[error("the conversation is too large: {what} exceeds {limit}")]
    TooLarge { what: &'static str, limit: u64 },
    /// The system gives no thread to render on.
    #[error("no thread for the chat template: {source}")]
    NoThread { source: std::io::Error },
    /// A role that would let the template spell a control token.
    #[error("role `{role}` is not allowed")]
    BadRole { role: String },
    /// An option, or a combination of options, that makes no sense.
    #[error("{field}: {problem}")]
    BadOption { field: &'static str, problem: String },
}

impl From<TokenizerError> for Error {
    fn from(error: TokenizerError) -> Self {
        let message = error.to_string();
        match error {
            TokenizerError::UnknownVocabulary { .. }
            | TokenizerError::UnknownPreTokenizer { .. }
            | TokenizerError::BadVocabulary { .. }
            | TokenizerError::UnsupportedJson { .. } => Error::new(ErrorCode::Unsupported, message),
            TokenizerError::NoChatTemplate | TokenizerError::UnusableTemplate { .. } => Error {
                field: Some("messages".into()),
                ..Error::new(ErrorCode::Unsupported, message)
            },
            TokenizerError::Template { .. }
            | TokenizerError::TooLarge { .. }
            | TokenizerError::BadRole { .. } => Error::invalid("messages", message),
            TokenizerError::NoThread { .. } => Error::unavailable(message),
            TokenizerError::BadOption { field, .. } => Error::invalid(field, message),
        }
    }
}
