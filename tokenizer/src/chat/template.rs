//! One model's template, compiled, and its rendering within bounds.
//!
//! Templates come with the model, never with a request. One that was written to do harm is
//! stopped by its size, its fuel, its depth or the deadline; what the engine lets through is a
//! template that doubles a list by `+` more than 32 times, or joins nested copies of a list by
//! `~`: its caller is answered at the deadline, but its thread goes on and takes memory.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde_json::Map;

use super::sandbox::{Sandbox, SandboxError};
use super::shield::{Shield, allows_role};
use super::{ChatMessage, ChatOptions, python};
use crate::TokenizerError;
use crate::control::ControlTokens;

/// Bytes of all messages and arguments of one request.
const MAX_INPUT_BYTES: usize = 8 << 20;
/// Bytes of one rendered conversation.
const MAX_RENDERED_BYTES: usize = 8 << 20;
/// Bytes of a template's source.
const MAX_TEMPLATE_BYTES: usize = 128 << 10;
/// Instructions, plus one for every 64 bytes that a template makes: bounds time and memory.
const MAX_FUEL: u64 = 4_000_000;
/// Nested blocks, macros and loops.
const MAX_DEPTH: usize = 150;

/// For one rendering; some thirty times what the fuel lasts.
const MAX_TIME: Duration = Duration::from_secs(10);

const NAME: &str = "chat_template";
/// Variables that are the server's.
const RESERVED: [&str; 2] = ["messages", "add_generation_prompt"];
/// Ends the last message where the answer is to go on; what a user writes never contains it.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG";

/// A compiled chat template.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    /// Or why the source does not parse.
    environment: Result<Arc<Environment<'static>>, String>,
    sandbox: Sandbox,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

/// A rendered conversation, in which no user's text can be taken for a control token.
#[derive(Debug)]
pub(crate) struct Rendered {
    pub(crate) text: String,
    mark: char,
}

impl Rendered {
    /// `text` as its user wrote it.
    pub(crate) fn uncover(&self, text: &str) -> String {
        text.replace(self.mark, "")
    }
}

impl ChatTemplate {
    pub(crate) fn new(source: &str, bos_token: Option<String>, eos_token: Option<String>) -> Self {
        let sandbox = Sandbox::new(MAX_TIME);
        let owned = source.to_owned();
        let environment = match sandbox.run(move || compile(&owned).map_err(|e| e.to_string())) {
            Ok(compiled) => compiled.map(Arc::new),
            Err(error) => Err(TokenizerError::from(error).to_string()),
        };
        Self { environment, sandbox, bos_token, eos_token }
    }

    /// Why the source does not parse.
    pub(crate) fn problem(&self) -> Option<&str> {
        self.environment.as_ref().err().map(String::as_str)
    }

    /// # Errors
    /// As [`Tokenizer::encode_chat`](crate::Tokenizer::encode_chat).
    pub(crate) fn render(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        control: &ControlTokens,
    ) -> Result<Rendered, TokenizerError> {
        check(messages, options, control)?;
        let environment = self
            .environment
            .as_ref()
            .map_err(|problem| TokenizerError::UnusableTemplate { problem: problem.clone() })?;
        let extra = serde_json::Value::Object(options.extra.clone());
        let extra_text = extra.to_string();
        let too_large = TokenizerError::TooLarge {
            what: "the text of all messages and arguments, in bytes",
            limit: MAX_INPUT_BYTES as u64,
        };
        let texts = || messages.iter().flat_map(texts_of).chain([extra_text.as_str()]);
        if texts().map(str::len).sum::<usize>() > MAX_INPUT_BYTES {
            return Err(too_large);
        }
        let shield = Shield::new(control, texts()).ok_or(TokenizerError::Template {
            problem: "the messages use every noncharacter from U+FDD0 to U+FDEF".into(),
        })?;
        let context = self.context(messages, options, &shield);
        let environment = Arc::clone(environment);
        let mut text = self.sandbox.run(move || render_bounded(&environment, context))??;
        if options.continue_final_message {
            cut_at_tag(&mut text, &continue_tag(&shield))?;
        }
        Ok(Rendered { text, mark: shield.mark() })
    }

    fn context(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        shield: &Shield<'_>,
    ) -> Value {
        let mut covered: Vec<ChatMessage> = messages
            .iter()
            .map(|message| ChatMessage {
                role: shield.cover(&message.role),
                content: shield.cover(&message.content),
                name: message.name.as_deref().map(|name| shield.cover(name)),
            })
            .collect();
        if options.continue_final_message
            && let Some(last) = covered.last_mut()
        {
            last.content.push_str(&continue_tag(shield));
        }
        let mut variables: Map<String, serde_json::Value> = Map::new();
        for name in ["tools", "documents"] {
            variables.insert(name.into(), serde_json::Value::Null);
        }
        for (name, token) in [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)] {
            if let Some(token) = token {
                variables.insert(name.into(), token.as_str().into());
            }
        }
        variables.extend(shield.cover_map(&options.extra));
        let context = Value::from(Serde(variables));
        minijinja::context! {
            messages => Value::from(Serde(covered)),
            add_generation_prompt => options.add_generation_prompt,
            ..context
        }
    }
}

/// The rules that need no template.
fn check(
    messages: &[ChatMessage],
    options: &ChatOptions,
    control: &ControlTokens,
) -> Result<(), TokenizerError> {
    let bad = |field, problem: String| Err(TokenizerError::BadOption { field, problem });
    if let Some(message) = messages.iter().find(|message| !allows_role(control, &message.role)) {
        return Err(TokenizerError::BadRole { role: message.role.clone() });
    }
    if options.continue_final_message {
        let field = "continue_final_message";
        if options.add_generation_prompt {
            return bad(field, "cannot be combined with add_generation_prompt".into());
        }
        if messages.is_empty() {
            return bad(field, "there is no message to continue".into());
        }
    }
    match RESERVED.iter().find(|name| options.extra.contains_key(**name)) {
        Some(name) => bad("chat_template_kwargs", format!("`{name}` cannot be set here")),
        None => Ok(()),
    }
}

fn texts_of(message: &ChatMessage) -> impl Iterator<Item = &str> {
    [&message.role, &message.content].into_iter().chain(&message.name).map(String::as_str)
}

/// The tag cannot be a user's: it holds the mark.
fn continue_tag(shield: &Shield<'_>) -> String {
    format!("{0}{CONTINUE_TAG}{0} ", shield.mark())
}

/// Ends `text` where the tag is. The tag ends in a space: if the template has trimmed that, it
/// has trimmed the message, and so the text before the tag is trimmed too.
fn cut_at_tag(text: &mut String, tag: &str) -> Result<(), TokenizerError> {
    let at = text.rfind(tag.trim_end()).ok_or_else(|| TokenizerError::BadOption {
        field: "continue_final_message",
        problem: "the chat template does not show the last message as it is".into(),
    })?;
    let is_trimmed = !text[at..].starts_with(tag);
    text.truncate(at);
    if is_trimmed {
        text.truncate(text.trim_end().len());
    }
    Ok(())
}

fn compile(source: &str) -> Result<Environment<'static>, Error> {
    if source.len() > MAX_TEMPLATE_BYTES {
        let limit = format!("the template is larger than {MAX_TEMPLATE_BYTES} bytes");
        return Err(Error::new(ErrorKind::SyntaxError, limit));
    }
    let mut environment = Environment::new();
    // As transformers sets up Jinja.
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(MAX_FUEL));
    environment.set_recursion_limit(MAX_DEPTH);
    python::install(&mut environment);
    environment.add_template_owned(NAME, without_generation_tags(source))?;
    Ok(environment)
}

/// `{% generation %}` marks what training counts as the answer; to a server it is a plain block.
fn without_generation_tags(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        plain.push_str(before);
        let Some((inside, after)) = tag.split_once("%}") else {
            rest = tag;
            continue;
        };
        let name = inside.trim_matches(['-', '+', ' ']);
        let block = match name {
            "generation" => " if true ",
            "endgeneration" => " endif ",
            _ => {
                rest = tag;
                continue;
            }
        };
        plain.push_str(&inside.replacen(name, block, 1));
        plain.push_str("%}");
        rest = after;
    }
    plain.push_str(rest);
    plain
}

fn render_bounded(environment: &Environment<'_>, context: Value) -> Result<String, TokenizerError> {
    let mut out = BoundedOutput { bytes: Vec::new(), is_full: false };
    let rendered = environment
        .get_template(NAME)
        .and_then(|template| template.render_captured_to(context, &mut out).map(drop));
    match rendered {
        Ok(()) => Ok(String::from_utf8_lossy(&out.bytes).into_owned()),
        Err(_) if out.is_full => Err(TokenizerError::TooLarge {
            what: "the rendered conversation, in bytes",
            limit: MAX_RENDERED_BYTES as u64,
        }),
        Err(error) if error.kind() == ErrorKind::OutOfFuel => Err(TokenizerError::TooLarge {
            what: "the work of the chat template, in steps",
            limit: MAX_FUEL,
        }),
        Err(error) => Err(TokenizerError::Template { problem: error.to_string() }),
    }
}

impl From<SandboxError> for TokenizerError {
    fn from(error: SandboxError) -> Self {
        match error {
            SandboxError::Overdue => TokenizerError::TooLarge {
                what: "the time of the chat template, in ms",
                limit: u64::try_from(MAX_TIME.as_millis()).unwrap_or(u64::MAX),
            },
            SandboxError::Panicked => {
                TokenizerError::Template { problem: "the template engine failed".into() }
            }
            SandboxError::NoThread(source) => TokenizerError::NoThread { source },
        }
    }
}

/// The output of a template, up to a bound.
struct BoundedOutput {
    bytes: Vec<u8>,
    is_full: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_RENDERED_BYTES {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
