//! Tokenizer, chat template, and the ids that begin a prompt and end an answer.

use std::path::Path;

use baton_types::{ModelArtifacts, ModelSpec, TokenId, TokenizerSource};
use serde::Deserialize;

use super::config::{self, IdOrIds};
use super::json::{Object, even_null, parse, read_json, read_text};
use super::tokenizer::TokenizerJson;
use crate::ModelFileError;

const TOKENIZER_FILE: &str = "tokenizer.json";
const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";
const GENERATION_FILE: &str = "generation_config.json";
/// Classes that put BOS before a prompt unless `add_bos_token` is false, whatever `tokenizer.json`
/// says: so in transformers 4, for which their folders were written.
const BOS_CLASSES: [&str; 6] = [
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
];
/// Stands for a list of templates that lacks `default`: prompts can be completed all the same.
const NO_DEFAULT: &str = "{{ raise_exception('chat_template of tokenizer_config.json has no \
                          template called default') }}";

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    tokenizer_class: Option<String>,
    chat_template: Option<ChatTemplates>,
    add_bos_token: Option<bool>,
    /// `Some(None)`: there is said to be none.
    #[serde(default, deserialize_with = "even_null")]
    bos_token: Option<Option<TokenText>>,
    eos_token: Option<TokenText>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of {name, template} is needed")]
enum ChatTemplates {
    One(String),
    Named(Vec<Object<NamedTemplate>>),
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
            Self::Named(all) if all.is_empty() => None,
            Self::Named(all) => {
                let mut all = all.into_iter().map(|Object(named)| named);
                let default = all.find(|named| named.name == "default");
                Some(default.map_or_else(|| NO_DEFAULT.to_owned(), |default| default.template))
            }
        }
    }
}

/// `"<s>"` or `{"content": "<s>"}`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a token's text or an object with its content is needed")]
enum TokenText {
    Plain(String),
    Added(Object<AddedText>),
}

#[derive(Deserialize)]
struct AddedText {
    content: String,
}

impl TokenText {
    fn as_str(&self) -> &str {
        match self {
            Self::Plain(text) => text,
            Self::Added(Object(added)) => &added.content,
        }
    }
}

#[derive(Default, Deserialize)]
struct GenerationConfig {
    bos_token_id: Option<TokenId>,
    eos_token_id: Option<IdOrIds>,
}

/// An id, and who names it.
#[derive(Clone, Copy)]
struct Named {
    id: TokenId,
    file: &'static str,
    key: &'static str,
}

/// Reads what a router needs. The tokenizer's own EOS is the first of `eos_ids`.
///
/// # Errors
/// When `tokenizer.json` is missing, JSON is broken, a token is none of the vocabulary's, or a
/// prompt would have other tokens around it than BOS.
pub(super) fn read(folder: &Path, spec: &ModelSpec) -> Result<ModelArtifacts, ModelFileError> {
    let text = read_text(folder, TOKENIZER_FILE)?.ok_or_else(|| ModelFileError::Open {
        path: folder.join(TOKENIZER_FILE),
        source: std::io::ErrorKind::NotFound.into(),
    })?;
    let prompts = Prompts {
        folder,
        tokenizer: parse(folder, TOKENIZER_FILE, &text)?,
        config: read_json(folder, TOKENIZER_CONFIG_FILE)?.unwrap_or_default(),
        generation: read_json(folder, GENERATION_FILE)?.unwrap_or_default(),
        spec,
    };
    let eos_ids = prompts.eos_ids()?;
    let (bos_id, add_bos) = prompts.bos(&eos_ids)?;
    let chat_template = match read_text(folder, TEMPLATE_FILE)? {
        Some(template) => Some(template),
        None => prompts.config.chat_template.and_then(ChatTemplates::into_default),
    };
    Ok(ModelArtifacts {
        tokenizer: TokenizerSource::Json(text),
        chat_template,
        bos_id,
        eos_ids,
        add_bos,
    })
}

/// The files that speak of the ids around a prompt.
struct Prompts<'a> {
    folder: &'a Path,
    tokenizer: TokenizerJson,
    config: TokenizerConfig,
    generation: GenerationConfig,
    spec: &'a ModelSpec,
}

impl Prompts<'_> {
    /// Every token that ends an answer, each once.
    fn eos_ids(&self) -> Result<Vec<TokenId>, ModelFileError> {
        let key = "eos_token_id";
        let own = match &self.config.eos_token {
            Some(token) => Some(self.token("eos_token", token.as_str())?),
            None => None,
        };
        let generation =
            self.generation.eos_token_id.clone().map_or_else(Vec::new, IdOrIds::into_ids);
        let generation = generation.into_iter().map(|id| Named { id, file: GENERATION_FILE, key });
        let config = self.spec.eos_ids.iter().map(|&id| Named { id, file: config::FILE, key });
        let mut ids = Vec::new();
        for named in own.into_iter().chain(generation).chain(config) {
            let id = self.checked(named)?;
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    /// BOS, and whether it stands before a raw prompt.
    fn bos(&self, eos_ids: &[TokenId]) -> Result<(Option<TokenId>, bool), ModelFileError> {
        let key = "bos_token_id";
        let named = match &self.config.bos_token {
            Some(token) => {
                token.as_ref().map(|t| self.token("bos_token", t.as_str())).transpose()?
            }
            None => {
                let config = self.spec.bos_id.map(|id| Named { id, file: config::FILE, key });
                let generation = self.generation.bos_token_id;
                config.or(generation.map(|id| Named { id, file: GENERATION_FILE, key }))
            }
        };
        let bos = named.map(|named| self.checked(named)).transpose()?;
        match (self.config.add_bos_token, bos) {
            (Some(false), _) => return Ok((bos, false)),
            (Some(true), None) => {
                let problem = "true, but neither bos_token nor bos_token_id of config.json says \
                               which token that is";
                return Err(self.refused(TOKENIZER_CONFIG_FILE, "add_bos_token", problem.into()));
            }
            _ => {}
        }
        let of_template = self.first_of_template(bos, eos_ids)?;
        let is_asked_for = self.config.add_bos_token.unwrap_or_else(|| match of_template {
            Some(first) => first.is_some(),
            None => {
                let class = self.config.tokenizer_class.as_deref();
                bos.is_some() && class.is_some_and(|class| BOS_CLASSES.contains(&class))
            }
        });
        Ok((bos.or(of_template.flatten()), is_asked_for))
    }

    /// What the post-processor puts before a prompt; `None` where it does not speak of it. An EOS
    /// after the prompt is left out: the prompt is to be continued.
    fn first_of_template(
        &self,
        bos: Option<TokenId>,
        eos_ids: &[TokenId],
    ) -> Result<Option<Option<TokenId>>, ModelFileError> {
        let key = "post_processor";
        let refuse = |problem| Err(self.refused(TOKENIZER_FILE, key, problem));
        let edges = match self.tokenizer.edges() {
            Ok(Some(edges)) => edges,
            Ok(None) => return Ok(None),
            Err(problem) => return refuse(problem),
        };
        if let Some(id) = edges.after.iter().find(|id| !eos_ids.contains(id)) {
            return refuse(format!("puts token {id} after a prompt, which does not end an answer"));
        }
        match (edges.before.as_slice(), bos) {
            ([], _) => Ok(Some(None)),
            (&[first], None) => self
                .checked(Named { id: first, file: TOKENIZER_FILE, key })
                .map(|id| Some(Some(id))),
            (&[first], Some(bos)) if first == bos => Ok(Some(Some(bos))),
            (&[first], Some(bos)) => refuse(format!(
                "puts token {first} before a prompt, but BOS is {bos}; give bos_token of \
                 {TOKENIZER_CONFIG_FILE} that token, or set add_bos_token there to false"
            )),
            (several, _) => refuse(format!("puts {several:?} before a prompt; only BOS can be")),
        }
    }

    /// The token that `key` of the tokenizer's configuration names.
    fn token(&self, key: &'static str, text: &str) -> Result<Named, ModelFileError> {
        let file = TOKENIZER_CONFIG_FILE;
        match self.tokenizer.id_of(text) {
            Some(id) => Ok(Named { id, file, key }),
            None => {
                let problem = format!("{text:?} is no token of {TOKENIZER_FILE}; name one of its");
                Err(self.refused(file, key, problem))
            }
        }
    }

    fn checked(&self, named: Named) -> Result<TokenId, ModelFileError> {
        let Named { id, file, key } = named;
        if (id as usize) < self.spec.vocab {
            return Ok(id);
        }
        let problem = format!("token {id} is not in the vocabulary of {}", self.spec.vocab);
        Err(self.refused(file, key, problem))
    }

    fn refused(&self, file: &str, key: &str, problem: String) -> ModelFileError {
        let file = self.folder.join(file).display().to_string();
        ModelFileError::KeyValue { file, key: key.to_owned(), problem }
    }
}
