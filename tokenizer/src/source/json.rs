//! From the text of a `tokenizer.json`.

use std::collections::{HashMap, HashSet};

use baton_types::{ModelArtifacts, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{ModelWrapper, Tokenizer as HfTokenizer};

use super::Vocabulary;
use crate::TokenizerError;
use crate::control::{ControlToken, ControlTokens};
use crate::pieces::{Pieces, Spelling};

/// More ids than any vocabulary has; a bound on what a broken file can make us allocate.
const MAX_IDS: usize = 1 << 22;

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    single_word: bool,
}

/// # Errors
/// For text that is no tokenizer, and for tokenizers of another kind than BPE.
pub(super) fn read(text: &str, artifacts: &ModelArtifacts) -> Result<Vocabulary, TokenizerError> {
    let mut definition: Map<String, Value> = serde_json::from_str(text).map_err(unsupported)?;
    let added = definition.remove("added_tokens").unwrap_or_else(|| Value::Array(Vec::new()));
    let added: Vec<AddedToken> = serde_json::from_value(added).map_err(unsupported)?;
    let vocab = model_vocab(&definition)?;
    refuse_shared_ids(&vocab, &added)?;
    let size = 1
        + (added.iter().map(|token| token.id).chain(vocab.iter().map(|(_, id)| *id)))
            .max()
            .ok_or_else(|| unsupported("the vocabulary is empty"))? as usize;
    if size > MAX_IDS {
        return Err(unsupported(format!("token id {} is out of bounds", size - 1)));
    }
    let spelling = spelling(&definition)?;
    let mut pieces = Pieces::new(spelling, size);
    let is_edge = |id| artifacts.eos_ids.contains(&id) || artifacts.bos_id == Some(id);
    let mut control = Vec::new();
    for (text, id) in &vocab {
        pieces.set_spelt(*id, text);
        if is_edge(*id) && added.iter().all(|token| token.id != *id) {
            pieces.set_literal(*id, text, true);
            control.push(ControlToken::plain(*id, text.clone()));
        }
    }
    for AddedToken { id, content: text, special, lstrip, rstrip, single_word } in added {
        let is_control = special || is_edge(id);
        pieces.set_literal(id, &text, is_control);
        if is_control {
            control.push(ControlToken { id, text, lstrip, rstrip, single_word });
        }
    }
    let plain = without_control(text, &control)?;
    let plain_inner = without_prefix(&plain);
    Ok(Vocabulary { plain, plain_inner, control: ControlTokens::new(control), pieces })
}

fn model_vocab(definition: &Map<String, Value>) -> Result<Vec<(String, TokenId)>, TokenizerError> {
    let model = definition.get("model").unwrap_or(&Value::Null);
    match model.get("type").and_then(Value::as_str) {
        None | Some("BPE") => {}
        Some(kind) => return Err(unsupported(format!("models of kind {kind}; only BPE is"))),
    }
    let vocab = model.get("vocab").and_then(Value::as_object);
    vocab
        .ok_or_else(|| unsupported("there is no model.vocab"))?
        .iter()
        .map(|(text, id)| {
            let id = id.as_u64().and_then(|id| TokenId::try_from(id).ok());
            let id = id.ok_or_else(|| unsupported(format!("token `{text}` has no id")))?;
            Ok((text.clone(), id))
        })
        .collect()
}

/// An id stands for one text, or what is encoded is not what is decoded.
fn refuse_shared_ids(
    vocab: &[(String, TokenId)],
    added: &[AddedToken],
) -> Result<(), TokenizerError> {
    let mut texts: HashMap<TokenId, &str> =
        vocab.iter().map(|(text, id)| (*id, text.as_str())).collect();
    for AddedToken { id, content, .. } in added {
        if let Some(other) = texts.insert(*id, content)
            && other != content
        {
            let problem = format!("added token `{content}` has the id {id} of `{other}`");
            return Err(unsupported(problem));
        }
    }
    Ok(())
}

/// How the decoder says that bytes are written.
fn spelling(definition: &Map<String, Value>) -> Result<Spelling, TokenizerError> {
    let decoder = definition.get("decoder").unwrap_or(&Value::Null);
    let single = std::slice::from_ref(decoder);
    let steps = decoder.get("decoders").and_then(Value::as_array).map_or(single, Vec::as_slice);
    let mut strip_leading_space = false;
    let mut is_metaspace = false;
    for step in steps {
        match step.get("type").and_then(Value::as_str) {
            Some("ByteLevel") => return Ok(Spelling::ByteLevel),
            Some("Metaspace") => {
                is_metaspace = true;
                strip_leading_space |= step.get("prepend_scheme").and_then(Value::as_str)
                    != Some("never")
                    && step.get("add_prefix_space") != Some(&Value::Bool(false));
            }
            Some("Replace" | "ByteFallback" | "Fuse") => is_metaspace = true,
            Some("Strip") => strip_leading_space = true,
            kind => {
                let kind = kind.unwrap_or("none");
                return Err(unsupported(format!("decoders of kind {kind}")));
            }
        }
    }
    if is_metaspace {
        return Ok(Spelling::Metaspace { strip_leading_space });
    }
    Err(unsupported("the decoder is neither byte-level nor SentencePiece's"))
}

/// The tokenizer without its control tokens: neither added, nor in the vocabulary.
fn without_control(text: &str, control: &[ControlToken]) -> Result<HfTokenizer, TokenizerError> {
    let mut definition: Map<String, Value> = serde_json::from_str(text).map_err(unsupported)?;
    // Left from training: they would cut or fill up a prompt, or put in tokens, or choose merges at
    // random. What of the post-processor counts is in the artifacts.
    for key in ["truncation", "padding", "post_processor"] {
        definition.insert(key.into(), Value::Null);
    }
    let mut kept = Vec::new();
    if let Some(added) = definition.get_mut("added_tokens").and_then(Value::as_array_mut) {
        added.retain(|token| {
            let id = token.get("id").and_then(Value::as_u64);
            control.iter().all(|control| Some(u64::from(control.id)) != id)
        });
        kept.clone_from(added);
    }
    if let Some(model) = definition.get_mut("model").and_then(Value::as_object_mut) {
        model.remove("dropout");
        let unknown = model.get("unk_token").and_then(Value::as_str).map(str::to_owned);
        let mut texts: HashSet<&str> = control.iter().map(|token| token.text.as_str()).collect();
        if let Some(unknown) = &unknown {
            texts.remove(unknown.as_str()); // BPE falls back on it
        }
        let is_control = |text: &str| texts.contains(text);
        if let Some(vocab) = model.get_mut("vocab").and_then(Value::as_object_mut) {
            vocab.retain(|text, _| !is_control(text));
            // The library numbers added tokens anew unless the vocabulary has them.
            for token in &kept {
                if let (Some(text), Some(id)) = (token["content"].as_str(), token.get("id")) {
                    vocab.entry(text).or_insert_with(|| id.clone());
                }
            }
        }
        if let Some(merges) = model.get_mut("merges").and_then(Value::as_array_mut) {
            merges.retain(|merge| !merge_parts(merge).iter().any(|part| is_control(part)));
        }
    }
    let text = Value::Object(definition).to_string();
    let tokenizer: HfTokenizer = text.parse().map_err(unsupported)?;
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
        && let Some(unknown) = bpe.get_unk_token()
        && !bpe.get_vocab().contains_key(unknown)
    {
        return Err(unsupported(format!("unknown token `{unknown}` is not in the vocabulary")));
    }
    Ok(tokenizer)
}

/// The two tokens of a merge and the one that they make.
fn merge_parts(merge: &Value) -> Vec<String> {
    let parts = match merge {
        Value::Array(parts) if parts.len() == 2 => parts[0].as_str().zip(parts[1].as_str()),
        Value::String(text) => text.split_once(' '),
        _ => None,
    };
    parts.map_or_else(Vec::new, |(left, right)| {
        vec![left.into(), right.into(), format!("{left}{right}")]
    })
}

/// A copy that puts no space before the text, if the original does so only where a prompt starts.
fn without_prefix(plain: &HfTokenizer) -> Option<HfTokenizer> {
    let mut pre = plain.get_pre_tokenizer()?.clone();
    if !drop_first_prefix(&mut pre) {
        return None;
    }
    let mut inner = plain.clone();
    inner.with_pre_tokenizer(Some(pre));
    Some(inner)
}

fn drop_first_prefix(pre: &mut PreTokenizerWrapper) -> bool {
    match pre {
        PreTokenizerWrapper::Metaspace(step) if step.prepend_scheme == PrependScheme::First => {
            step.prepend_scheme = PrependScheme::Never;
            true
        }
        PreTokenizerWrapper::Sequence(steps) => {
            let mut list: Vec<PreTokenizerWrapper> = steps.clone().into_iter().collect();
            let changed = list.iter_mut().fold(false, |any, step| drop_first_prefix(step) | any);
            *steps = Sequence::new(list);
            changed
        }
        _ => false,
    }
}

fn unsupported(problem: impl ToString) -> TokenizerError {
    TokenizerError::UnsupportedJson { problem: problem.to_string() }
}
