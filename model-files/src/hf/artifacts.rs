//! Tokenizer, chat template and the ids that end an answer.

use std::path::Path;

use baton_types::{ModelArtifacts, ModelSpec, TokenId, TokenizerSource};
use serde::Deserialize;

use super::config::IdOrIds;
use super::{read_json, read_text};
use crate::ModelFileError;

const TOKENIZER_FILE: &str = "tokenizer.json";
const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";
const GENERATION_FILE: &str = "generation_config.json";

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<ChatTemplates>,
    add_bos_token: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of {name, template} is needed")]
enum ChatTemplates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl ChatTemplates {
    /// The only one, or the one called `default`.
    fn into_default(self) -> Option<String> {
        match self {
            Self::One(template) => Some(template),
            Self::Named(all) => all
                .into_iter()
                .find(|named| named.name == "default")
                .map(|default| default.template),
        }
    }
}

#[derive(Default, Deserialize)]
struct GenerationConfig {
    bos_token_id: Option<TokenId>,
    eos_token_id: Option<IdOrIds>,
}

/// Reads what a router needs.
///
/// # Errors
/// When `tokenizer.json` is missing, JSON is broken, or an id lies outside the vocabulary.
pub(super) fn read(folder: &Path, spec: &ModelSpec) -> Result<ModelArtifacts, ModelFileError> {
    let tokenizer = read_text(folder, TOKENIZER_FILE)?.ok_or_else(|| ModelFileError::Open {
        path: folder.join(TOKENIZER_FILE),
        source: std::io::ErrorKind::NotFound.into(),
    })?;
    let config: TokenizerConfig = read_json(folder, TOKENIZER_CONFIG_FILE)?.unwrap_or_default();
    let generation: GenerationConfig = read_json(folder, GENERATION_FILE)?.unwrap_or_default();
    let mut eos_ids = generation.eos_token_id.map_or_else(Vec::new, IdOrIds::into_ids);
    for id in &spec.eos_ids {
        if !eos_ids.contains(id) {
            eos_ids.push(*id);
        }
    }
    let bos_id = spec.bos_id.or(generation.bos_token_id);
    for id in eos_ids.iter().chain(&bos_id) {
        if *id as usize >= spec.vocab {
            return Err(ModelFileError::KeyValue {
                file: folder.display().to_string(),
                key: "bos_token_id or eos_token_id".into(),
                problem: format!("token {id} is not in the vocabulary of {}", spec.vocab),
            });
        }
    }
    let chat_template = match read_text(folder, TEMPLATE_FILE)? {
        Some(template) => Some(template),
        None => config.chat_template.and_then(ChatTemplates::into_default),
    };
    Ok(ModelArtifacts {
        tokenizer: TokenizerSource::Json(tokenizer),
        chat_template,
        bos_id,
        eos_ids,
        add_bos: config.add_bos_token.unwrap_or(false),
    })
}
