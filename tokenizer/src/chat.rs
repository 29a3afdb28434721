//! Conversations, rendered by the model's own Jinja template.

mod clock;
mod json;
mod python;
mod sandbox;
mod shield;
mod template;

use serde::Serialize;
use serde_json::{Map, Value};

pub(crate) use template::ChatTemplate;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    pub role: String,
    pub content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl ChatMessage {
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), name: None }
    }
}

/// How a conversation is rendered.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatOptions {
    /// End with the header of the answer that is wanted.
    pub add_generation_prompt: bool,
    /// Leave the last message open, so that the answer goes on in it. Not together with
    /// `add_generation_prompt`.
    pub continue_final_message: bool,
    /// More variables for the template (`chat_template_kwargs`).
    pub extra: Map<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, continue_final_message: false, extra: Map::new() }
    }
}

#[cfg(test)]
mod tests;
