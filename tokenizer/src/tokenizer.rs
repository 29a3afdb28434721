//! The tokenizer of one model.

use std::fmt;
use std::sync::Arc;

use baton_types::{ModelArtifacts, TokenId};
use tokenizers::Tokenizer as HfTokenizer;

use crate::chat::ChatTemplate;
use crate::control::{ControlTokens, Segment};
use crate::pieces::Pieces;
use crate::source::Vocabulary;
use crate::{ChatMessage, ChatOptions, TextDecoder, TokenizerError};

/// Text to token ids and back, for one model. Shared between threads behind an [`Arc`].
pub struct Tokenizer {
    plain: HfTokenizer,
    plain_inner: Option<HfTokenizer>,
    control: ControlTokens,
    pieces: Arc<Pieces>,
    /// Put before raw prompts.
    prompt_bos: Option<TokenId>,
    chat_template: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Builds the tokenizer; takes some tenths of a second for large vocabularies.
    ///
    /// A chat template that does not parse is reported by [`encode_chat`](Self::encode_chat), so
    /// that the model can still complete prompts.
    ///
    /// # Errors
    /// For vocabularies that are broken, or of a kind that this build does not know.
    pub fn from_artifacts(artifacts: &ModelArtifacts) -> Result<Self, TokenizerError> {
        let Vocabulary { plain, plain_inner, control, pieces } =
            Vocabulary::from_artifacts(artifacts)?;
        let name =
            |id: TokenId| pieces.bytes(id).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        let chat_template = artifacts.chat_template.as_deref().map(|source| {
            // The tokenizer's own stands first.
            let eos = artifacts.eos_ids.first().copied();
            ChatTemplate::new(source, artifacts.bos_id.and_then(name), eos.and_then(name))
        });
        let prompt_bos = artifacts.bos_id.filter(|_| artifacts.add_bos);
        if let Some(id) = prompt_bos.filter(|id| *id as usize >= pieces.len()) {
            let problem = format!("BOS is token {id}, of {} tokens", pieces.len());
            return Err(TokenizerError::BadVocabulary { problem });
        }
        let pieces = Arc::new(pieces);
        Ok(Self { plain, plain_inner, control, pieces, prompt_bos, chat_template })
    }

    /// The ids of `text` as it stands: no BOS, and no control token whatever the text says.
    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        encode_plain(&self.plain, text)
    }

    /// [`encode`](Self::encode), after the BOS token if the model wants one.
    pub fn encode_prompt(&self, text: &str) -> Vec<TokenId> {
        let mut ids = self.encode(text);
        if let Some(bos) = self.prompt_bos {
            ids.insert(0, bos);
        }
        ids
    }

    /// The ids of `text`, in which the names of control tokens become those tokens. Never for
    /// what a user wrote.
    pub fn encode_with_control(&self, text: &str) -> Vec<TokenId> {
        self.encode_segments(text, &str::to_owned)
    }

    /// Renders a conversation by the model's chat template. Control tokens come from the template
    /// alone: where a message, a role, a name or a template argument contains the text of one, it
    /// is encoded as text.
    ///
    /// # Errors
    /// When the model has no template, when the template fails or refuses the conversation, and
    /// when a bound on size or time is reached.
    pub fn encode_chat(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        let template = self.chat_template.as_ref().ok_or(TokenizerError::NoChatTemplate)?;
        let rendered = template.render(messages, options, &self.control)?;
        Ok(self.encode_segments(&rendered.text, &|text| rendered.uncover(text)))
    }

    pub fn has_chat_template(&self) -> bool {
        self.chat_template.is_some()
    }

    /// Why the chat template can render nothing at all, if it cannot.
    pub fn chat_template_problem(&self) -> Option<&str> {
        self.chat_template.as_ref()?.problem()
    }

    /// Number of ids, control tokens and holes included.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The text of `ids`: control tokens are left out, broken UTF-8 becomes U+FFFD, and where the
    /// encoder puts a space before a text it is taken away again.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        let mut decoder = self.decoder();
        let mut text: String = ids.iter().map(|id| decoder.push(*id)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// One token by itself, with U+FFFD where it is not whole UTF-8. Control tokens show their
    /// name; ids outside the vocabulary are empty.
    pub fn token_text(&self, id: TokenId) -> String {
        self.pieces
            .bytes(id)
            .map_or_else(String::new, |bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// The bytes of one token, those of its name for a control token; `None` outside the
    /// vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        self.pieces.bytes(id).map(<[u8]>::to_vec)
    }

    /// Decodes one answer as it comes; owns what it needs.
    pub fn decoder(&self) -> TextDecoder {
        TextDecoder::new(Arc::clone(&self.pieces))
    }

    /// Encodes `text` with its control tokens; `finish_text` is applied to the text between them.
    fn encode_segments(&self, text: &str, finish_text: &dyn Fn(&str) -> String) -> Vec<TokenId> {
        let mut ids = Vec::new();
        for segment in self.control.split(text) {
            match segment {
                Segment::Control(id) => ids.push(id),
                Segment::Text(text) => {
                    let inner = self.plain_inner.as_ref().filter(|_| !ids.is_empty());
                    let plain = inner.unwrap_or(&self.plain);
                    ids.extend(encode_plain(plain, &finish_text(text)));
                }
            }
        }
        ids
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("has_chat_template", &self.has_chat_template())
            .finish_non_exhaustive()
    }
}

fn encode_plain(tokenizer: &HfTokenizer, text: &str) -> Vec<TokenId> {
    tokenizer
        .encode_fast(text, false)
        .expect("BPE fails only if the unknown token is no token, which loading has checked")
        .get_ids()
        .to_vec()
}
