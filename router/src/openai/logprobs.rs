//! Log-probabilities, in the two shapes that OpenAI's endpoints have.

use baton_tokenizer::Tokenizer;
use baton_types::{TokenId, TokenLogprobs, TokenOutput};
use serde_json::{Map, Value, json};

/// One entry of a chat choice's `logprobs.content`.
pub(super) fn chat_entry(tokenizer: &Tokenizer, token: &TokenOutput) -> Option<Value> {
    let logprobs = token.logprobs.as_ref()?;
    let mut entry = named(tokenizer, token.id, logprobs.logprob);
    let top =
        logprobs.top.iter().map(|&(id, logprob)| Value::Object(named(tokenizer, id, logprob)));
    entry.insert("top_logprobs".into(), top.collect());
    Some(Value::Object(entry))
}

fn named(tokenizer: &Tokenizer, id: TokenId, logprob: f32) -> Map<String, Value> {
    let mut entry = Map::new();
    entry.insert("token".into(), tokenizer.token_text(id).into());
    entry.insert("logprob".into(), logprob.into());
    entry.insert("bytes".into(), tokenizer.token_bytes(id).map_or(Value::Null, Value::from));
    entry
}

/// A completion choice's `logprobs`: four lists of equal length.
#[derive(Debug, Default)]
pub(super) struct CompletionLogprobs {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
    offset: usize,
}

impl CompletionLogprobs {
    /// Starts at so many characters of the choice's text.
    pub fn at(offset: usize) -> Self {
        Self { offset, ..Self::default() }
    }

    pub fn offset(&self) -> usize {
        self.offset
    }

    pub fn push(&mut self, tokenizer: &Tokenizer, id: TokenId, logprobs: Option<&TokenLogprobs>) {
        let text = tokenizer.token_text(id);
        self.text_offset.push(self.offset.into());
        self.offset += text.chars().count();
        self.tokens.push(text.into());
        self.token_logprobs.push(logprobs.map_or(Value::Null, |one| one.logprob.into()));
        let top = logprobs.map_or(Value::Null, |one| {
            let entry =
                |&(id, logprob): &(TokenId, f32)| (tokenizer.token_text(id), Value::from(logprob));
            Value::Object(one.top.iter().map(entry).collect())
        });
        self.top_logprobs.push(top);
    }

    pub fn into_json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}
