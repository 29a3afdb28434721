//! What `tokenizer.json` says of tokens by name, and of those that stand around a prompt; how text
//! is encoded is the tokenizer's own matter.

use std::collections::HashMap;

use baton_types::TokenId;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::json::Object;

#[derive(Deserialize)]
pub(super) struct TokenizerJson {
    added_tokens: Option<Vec<Object<AddedToken>>>,
    post_processor: Option<PostProcessor>,
    model: Option<Object<Model>>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
}

#[derive(Deserialize)]
struct Model {
    /// Text to id, where the model is one that is served.
    vocab: Option<Value>,
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum PostProcessor {
    ByteLevel,
    Sequence { processors: Vec<PostProcessor> },
    TemplateProcessing { single: Vec<Piece>, special_tokens: HashMap<String, SpecialToken> },
    BertProcessing { cls: (String, TokenId), sep: (String, TokenId) },
    RobertaProcessing { cls: (String, TokenId), sep: (String, TokenId) },
}

#[derive(Deserialize)]
enum Piece {
    Sequence(IgnoredAny),
    SpecialToken { id: String },
}

#[derive(Deserialize)]
struct SpecialToken {
    ids: Vec<TokenId>,
}

/// The tokens that the post-processor puts around a prompt.
#[derive(Debug, Default)]
pub(super) struct Edges {
    pub(super) before: Vec<TokenId>,
    pub(super) after: Vec<TokenId>,
}

impl TokenizerJson {
    pub(super) fn id_of(&self, text: &str) -> Option<TokenId> {
        let mut added = self.added_tokens.iter().flatten();
        if let Some(Object(token)) = added.find(|token| token.0.content == text) {
            return Some(token.id);
        }
        let id = self.model.as_ref()?.0.vocab.as_ref()?.get(text)?.as_u64()?;
        TokenId::try_from(id).ok()
    }

    /// `None` where no post-processor speaks of tokens.
    ///
    /// # Errors
    /// For a template with a token that has no id, in words.
    pub(super) fn edges(&self) -> Result<Option<Edges>, String> {
        let mut edges = None;
        self.post_processor.iter().try_for_each(|step| step.put_around(&mut edges))?;
        Ok(edges)
    }
}

impl PostProcessor {
    /// Adds what this step puts around what `edges` holds already.
    fn put_around(&self, edges: &mut Option<Edges>) -> Result<(), String> {
        let (mut before, mut after) = (Vec::new(), Vec::new());
        match self {
            Self::ByteLevel => return Ok(()),
            Self::Sequence { processors } => {
                return processors.iter().try_for_each(|step| step.put_around(edges));
            }
            Self::TemplateProcessing { single, special_tokens } => {
                let mut side = &mut before;
                for piece in single {
                    match piece {
                        Piece::Sequence(_) => side = &mut after,
                        Piece::SpecialToken { id } => {
                            let token = special_tokens.get(id);
                            side.extend(&token.ok_or_else(|| format!("{id:?} has no ids"))?.ids);
                        }
                    }
                }
            }
            Self::BertProcessing { cls, sep } | Self::RobertaProcessing { cls, sep } => {
                before.push(cls.1);
                after.push(sep.1);
            }
        }
        let edges = edges.get_or_insert_default();
        edges.before.splice(0..0, before);
        edges.after.extend(after);
        Ok(())
    }
}
