//! Tokenizer and chat template from `tokenizer.*` metadata.

use baton_types::{GgufVocab, ModelArtifacts, ModelSpec, TokenId, TokenizerSource};

use super::header::Gguf;
use crate::ModelFileError;

/// Keys of tokens that end an answer.
const EOS_KEYS: [&str; 2] = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"];

/// Reads the vocabulary and checks that its parts fit one another.
///
/// # Errors
/// For keys that are missing, of the wrong type or of the wrong length.
pub(crate) fn artifacts(
    gguf: &Gguf<'_>,
    spec: &ModelSpec,
) -> Result<ModelArtifacts, ModelFileError> {
    let owned = |strings: Vec<&str>| strings.into_iter().map(str::to_owned).collect::<Vec<_>>();
    let model_key = "tokenizer.ggml.model";
    let tokens_key = "tokenizer.ggml.tokens";
    let model = gguf.text(model_key)?.ok_or_else(|| gguf.missing(model_key))?;
    let tokens = gguf.strings(tokens_key)?.ok_or_else(|| gguf.missing(tokens_key))?;
    check_len(gguf, tokens_key, tokens.len(), spec.vocab)?;
    let vocab = GgufVocab {
        model: model.to_owned(),
        pre: gguf.text("tokenizer.ggml.pre")?.map(str::to_owned),
        scores: per_token(gguf, "tokenizer.ggml.scores", spec.vocab)?
            .into_iter()
            .map(|score| score as f32)
            .collect(),
        token_types: per_token(gguf, "tokenizer.ggml.token_type", spec.vocab)?
            .into_iter()
            .map(|kind| kind as i32)
            .collect(),
        merges: owned(gguf.strings("tokenizer.ggml.merges")?.unwrap_or_default()),
        unknown_id: gguf.token_id("tokenizer.ggml.unknown_token_id", spec.vocab)?,
        add_space_prefix: gguf.flag("tokenizer.ggml.add_space_prefix")?,
        tokens: owned(tokens),
    };
    // llama.cpp puts BOS before the text of score-based vocabularies unless it is told not to.
    let add_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(model == "llama");
    Ok(ModelArtifacts {
        tokenizer: TokenizerSource::Gguf(vocab),
        chat_template: gguf.text("tokenizer.chat_template")?.map(str::to_owned),
        bos_id: spec.bos_id,
        eos_ids: spec.eos_ids.clone(),
        add_bos,
    })
}

/// Every token that ends an answer, each once.
pub(super) fn eos_ids(gguf: &Gguf<'_>, vocab: usize) -> Result<Vec<TokenId>, ModelFileError> {
    let mut ids = Vec::new();
    for key in EOS_KEYS {
        if let Some(id) = gguf.token_id(key, vocab)?
            && !ids.contains(&id)
        {
            ids.push(id);
        }
    }
    Ok(ids)
}

fn per_token(gguf: &Gguf<'_>, key: &str, vocab: usize) -> Result<Vec<f64>, ModelFileError> {
    let numbers = gguf.numbers(key)?.unwrap_or_default();
    if !numbers.is_empty() {
        check_len(gguf, key, numbers.len(), vocab)?;
    }
    Ok(numbers)
}

fn check_len(gguf: &Gguf<'_>, key: &str, got: usize, want: usize) -> Result<(), ModelFileError> {
    if got == want {
        return Ok(());
    }
    Err(gguf.bad_value(key, format!("{got} elements for a vocabulary of {want} tokens")))
}
