//! Tokenizer and chat template from `tokenizer.*` metadata.

use baton_types::{GgufVocab, ModelArtifacts, ModelSpec, TokenId, TokenizerSource};

use super::header::Gguf;
use crate::ModelFileError;

const TOKENS_KEY: &str = "tokenizer.ggml.tokens";
pub(super) const BOS_KEY: &str = "tokenizer.ggml.bos_token_id";
/// Keys of tokens that end an answer.
const EOS_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
/// Tokens that end a turn in a chat. Published files of Phi-3 and Gemma 3 name them by no key.
const TURN_ENDS: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];
/// Pre-tokenizers of byte-level vocabularies before whose text llama.cpp puts BOS unless it is told
/// not to.
const BOS_PRE: [&str; 6] = ["llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "tekken"];

/// Reads the vocabulary and checks that its parts fit one another.
///
/// # Errors
/// For keys that are missing, of the wrong type or of the wrong length.
pub(crate) fn artifacts(
    gguf: &Gguf<'_>,
    spec: &ModelSpec,
) -> Result<ModelArtifacts, ModelFileError> {
    let owned = |strings: Vec<&str>| strings.into_iter().map(str::to_owned).collect::<Vec<_>>();
    let merges_key = "tokenizer.ggml.merges";
    let model_key = "tokenizer.ggml.model";
    let model = gguf.text(model_key)?.ok_or_else(|| gguf.missing(model_key))?;
    let tokens = gguf.strings(TOKENS_KEY)?.ok_or_else(|| gguf.missing(TOKENS_KEY))?;
    check_len(gguf, TOKENS_KEY, tokens.len(), spec.vocab)?;
    let merges = gguf.strings(merges_key)?;
    if model == "gpt2" && merges.is_none() {
        return Err(gguf.missing(merges_key));
    }
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
        merges: owned(merges.unwrap_or_default()),
        unknown_id: gguf.token_id("tokenizer.ggml.unknown_token_id", spec.vocab)?,
        add_space_prefix: gguf.flag("tokenizer.ggml.add_space_prefix")?,
        tokens: owned(tokens),
    };
    let add_bos = adds_bos(gguf, &vocab)?;
    if add_bos && spec.bos_id.is_none() {
        return Err(gguf.missing(BOS_KEY));
    }
    Ok(ModelArtifacts {
        tokenizer: TokenizerSource::Gguf(vocab),
        chat_template: gguf.text("tokenizer.chat_template")?.map(str::to_owned),
        bos_id: spec.bos_id,
        eos_ids: spec.eos_ids.clone(),
        add_bos,
    })
}

/// Whether BOS stands before a raw prompt, by llama.cpp's defaults where the file does not say.
/// What `add_eos_token` asks for is left out: a prompt is to be continued.
fn adds_bos(gguf: &Gguf<'_>, vocab: &GgufVocab) -> Result<bool, ModelFileError> {
    let by_default = match vocab.model.as_str() {
        "llama" => true,
        _ => vocab.pre.as_deref().is_some_and(|pre| BOS_PRE.contains(&pre)),
    };
    Ok(gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(by_default))
}

/// Every token that ends an answer, each once; those that end a turn by their text, as llama.cpp
/// does it, where no key names one of them.
pub(super) fn eos_ids(gguf: &Gguf<'_>, vocab: usize) -> Result<Vec<TokenId>, ModelFileError> {
    let mut ids = Vec::new();
    for key in EOS_KEYS {
        if let Some(id) = gguf.token_id(key, vocab)?
            && !ids.contains(&id)
        {
            ids.push(id);
        }
    }
    let tokens = gguf.strings(TOKENS_KEY)?.unwrap_or_default();
    let ends_turn = |id: &TokenId| tokens.get(*id as usize).is_some_and(|t| TURN_ENDS.contains(t));
    if !ids.iter().any(ends_turn) {
        ids.extend((0..tokens.len().min(vocab) as TokenId).filter(ends_turn));
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
