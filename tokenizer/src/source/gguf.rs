//! From the vocabulary of a GGUF file.

use std::collections::HashSet;

use baton_types::{GgufVocab, ModelArtifacts, TokenId};
use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence};
use tokenizers::{AddedToken, NormalizerWrapper, Tokenizer as HfTokenizer};

use super::Vocabulary;
use super::merges::{self, Scored};
use super::pre::PreTokenizer;
use crate::TokenizerError;
use crate::control::{ControlToken, ControlTokens};
use crate::pieces::{Pieces, Spelling, fallback_byte};

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// # Errors
/// For unknown kinds and pre-tokenizers, and for merges outside the vocabulary.
pub(super) fn read(
    vocab: &GgufVocab,
    artifacts: &ModelArtifacts,
) -> Result<Vocabulary, TokenizerError> {
    let types = token_types(vocab, artifacts);
    let (spelling, mut plain) = match vocab.model.as_str() {
        "gpt2" => (Spelling::ByteLevel, byte_level(vocab, &types)?),
        "llama" => {
            let strip_leading_space = vocab.add_space_prefix.unwrap_or(true);
            (Spelling::Metaspace { strip_leading_space }, sentence_piece(vocab, &types)?)
        }
        model => return Err(TokenizerError::UnknownVocabulary { model: model.to_owned() }),
    };
    let mut pieces = Pieces::new(spelling, vocab.tokens.len());
    let mut control = Vec::new();
    let mut user_defined = Vec::new();
    for ((id, text), kind) in (0..).zip(&vocab.tokens).zip(&types) {
        match kind {
            TokenType::Control | TokenType::Unknown => {
                pieces.set_literal(id, text, true);
                control.push(ControlToken::plain(id, text.clone()));
            }
            TokenType::UserDefined => {
                pieces.set_literal(id, text, false);
                user_defined.push(AddedToken::from(text.clone(), false).normalized(false));
            }
            _ => pieces.set_spelt(id, text),
        }
    }
    plain.add_tokens(&user_defined);
    Ok(Vocabulary { plain, plain_inner: None, control: ControlTokens::new(control), pieces })
}

/// The type of every token; whatever begins or ends a text is control, even in files without
/// types.
fn token_types(vocab: &GgufVocab, artifacts: &ModelArtifacts) -> Vec<TokenType> {
    let is_score_based = vocab.model == "llama";
    let mut types: Vec<TokenType> = (0..vocab.tokens.len())
        .map(|id| match vocab.token_types.get(id) {
            Some(2) => TokenType::Unknown,
            Some(3) => TokenType::Control,
            Some(4) => TokenType::UserDefined,
            Some(5) => TokenType::Unused,
            Some(6) => TokenType::Byte,
            None if is_score_based && fallback_byte(&vocab.tokens[id]).is_some() => TokenType::Byte,
            _ => TokenType::Normal,
        })
        .collect();
    for id in artifacts.eos_ids.iter().chain(&artifacts.bos_id) {
        if let Some(kind) = types.get_mut(*id as usize) {
            *kind = TokenType::Control;
        }
    }
    if let Some(kind) = vocab.unknown_id.and_then(|id| types.get_mut(id as usize))
        && *kind == TokenType::Normal
    {
        *kind = TokenType::Unknown;
    }
    types
}

/// GPT-2's kind: bytes as characters, merges given.
fn byte_level(vocab: &GgufVocab, types: &[TokenType]) -> Result<HfTokenizer, TokenizerError> {
    let pre = PreTokenizer::named(vocab.pre.as_deref())?;
    let ids = vocab_of(vocab, types, &[TokenType::Normal, TokenType::UserDefined]);
    let taken_out: HashSet<&str> =
        vocab.tokens.iter().map(String::as_str).filter(|text| !ids.contains_key(*text)).collect();
    let mut merges = Vec::with_capacity(vocab.merges.len());
    for merge in &vocab.merges {
        let (left, right) = merge.split_once(' ').ok_or_else(|| TokenizerError::BadVocabulary {
            problem: format!("merge `{merge}` has no space"),
        })?;
        // No merge makes or needs a control token.
        if ![left, right, &format!("{left}{right}")].iter().any(|text| taken_out.contains(text)) {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    let builder = BPE::builder().ignore_merges(pre.ignores_merges);
    let mut tokenizer = build(builder.vocab_and_merges(ids, merges))?;
    pre.install(&mut tokenizer);
    Ok(tokenizer)
}

/// SentencePiece's kind: scores, `▁` for spaces, bytes for what has no token.
fn sentence_piece(vocab: &GgufVocab, types: &[TokenType]) -> Result<HfTokenizer, TokenizerError> {
    if vocab.scores.is_empty() {
        let problem = "a vocabulary of kind `llama` needs scores".to_owned();
        return Err(TokenizerError::BadVocabulary { problem });
    }
    let scored: Vec<Scored<'_>> = (vocab.tokens.iter().zip(&vocab.scores))
        .zip(types)
        .filter(|(_, kind)| matches!(kind, TokenType::Normal | TokenType::UserDefined))
        .map(|((text, score), _)| Scored { text, score: *score })
        .collect();
    let merges = merges::from_scores(&scored);
    let mut builder = BPE::builder().byte_fallback(true).fuse_unk(true);
    let is_unknown = |(_, kind): &(&String, &TokenType)| **kind == TokenType::Unknown;
    if let Some((text, _)) = vocab.tokens.iter().zip(types).find(is_unknown) {
        builder = builder.unk_token(text.clone());
    }
    let kept = [TokenType::Normal, TokenType::UserDefined, TokenType::Byte, TokenType::Unknown];
    let ids = vocab_of(vocab, types, &kept);
    let mut tokenizer = build(builder.vocab_and_merges(ids, merges))?;
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if vocab.add_space_prefix.unwrap_or(true) {
        steps.push(Prepend::new("▁".to_owned()).into());
    }
    steps.push(Replace::new(" ", "▁").expect("a plain string is a pattern").into());
    tokenizer.with_normalizer(Some(Sequence::new(steps)));
    Ok(tokenizer)
}

/// The tokens of the types `kept`, with their ids.
fn vocab_of(vocab: &GgufVocab, types: &[TokenType], kept: &[TokenType]) -> Vocab {
    (0..)
        .zip(&vocab.tokens)
        .zip(types)
        .filter(|(_, kind)| kept.contains(kind))
        .map(|((id, text), _): ((TokenId, &String), _)| (text.clone(), id))
        .collect()
}

fn build(builder: BpeBuilder) -> Result<HfTokenizer, TokenizerError> {
    let bpe = builder
        .build()
        .map_err(|error| TokenizerError::BadVocabulary { problem: error.to_string() })?;
    Ok(HfTokenizer::new(bpe))
}
