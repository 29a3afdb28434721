//! `/v1/completions`: one prompt or several, in text or in ids.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use baton_types::{Error, FinishReason, TokenId, TokenLogprobs, Usage};
use futures::StreamExt;
use futures::stream::{BoxStream, select_all};
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::Instrument;

use super::body::Fields;
use super::error::ApiError;
use super::logprobs::CompletionLogprobs;
use super::reply::{
    Chunks, Identity, event_stream, explain_json, total, usage_json, wants_explanation,
    with_request_id,
};
use super::wishes::{self, Delivery};
use crate::answer::{AnswerEvent, AnswerStream};
use crate::catalog::Model;
use crate::dispatch::Explain;
use crate::gateway::{Gateway, Prepared};

/// What OpenAI's endpoint takes where `max_tokens` is absent.
const DEFAULT_MAX_TOKENS: u32 = 16;

const PROMPTS_MAX: usize = 32;

#[derive(Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<TokenId>),
    ManyIds(Vec<Vec<TokenId>>),
}

/// How the reply is written.
#[derive(Clone, Copy, Debug, Default)]
struct Style {
    delivery: Delivery,
    explain: bool,
    /// Puts the prompt before the answer.
    echo: bool,
    logprobs: bool,
}

/// A parsed request: a request of the engine's for each prompt.
struct Parsed {
    prepared: Vec<Prepared>,
    style: Style,
}

/// An event of one of several prompts.
type Tagged = (usize, AnswerEvent);

pub(super) async fn create(
    State(gateway): State<Gateway>,
    headers: HeaderMap,
    fields: Fields,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let Parsed { prepared, style } = parse(&gateway, &headers, fields, arrived).await?;
    let first = &prepared[0];
    let (model, choices) = (first.model.clone(), usize::from(first.request.choices));
    let request_id = first.request.id.to_string();
    let prompts: Vec<Vec<TokenId>> =
        prepared.iter().map(|prepared| prepared.request.prompt.clone()).collect();
    let identity = Identity::new("cmpl", &request_id, "text_completion", &model);
    let running = prepared.into_iter().map(|prepared| gateway.run(prepared));
    let answers = futures::future::try_join_all(running).await?;
    let mut events = merge(answers);
    let mut writers = ChoiceWriters::new(&model, &prompts, choices, style);
    if style.delivery.stream {
        // What fails before the first event still has its own status.
        let first = events.next().await;
        if let Some((_, AnswerEvent::Failed(error))) = first {
            return Err(error.into());
        }
        let (chunks, response) = event_stream(&request_id);
        let span = tracing::info_span!("stream", request_id);
        tokio::spawn(write(chunks, identity, writers, first, events).instrument(span));
        return Ok(response);
    }
    let mut explains = vec![Explain::default(); prompts.len()];
    while let Some((prompt, event)) = events.next().await {
        match event {
            AnswerEvent::Failed(error) => return Err(error.into()),
            AnswerEvent::Done(explain) => explains[prompt] = *explain,
            event => writers.take(prompt, event),
        }
    }
    let mut object = identity.object(writers.into_choices());
    object.insert("usage".into(), usage_json(&total(explains.iter().map(Explain::usage))));
    if style.explain {
        object.insert("baton".into(), explain_json(&explains));
    }
    Ok(with_request_id(&request_id, Json(object)))
}

async fn parse(
    gateway: &Gateway,
    headers: &HeaderMap,
    mut fields: Fields,
    arrived: Instant,
) -> Result<Parsed, Error> {
    let name: String = fields.require("model")?;
    let model = gateway.model(&name)?;
    let prompt: Value = fields.require("prompt")?;
    let (mut wishes, delivery) = wishes::take(&mut fields)?;
    let prompts = prompts(gateway, &model, prompt, wishes.tokens_most(&model)).await?;
    let echo = fields.take("echo")?.unwrap_or(false);
    wishes.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
    wishes.logprobs = fields.take("logprobs")?;
    if echo {
        wishes.prompt_logprobs = wishes.logprobs;
    }
    fields.finish()?;
    let style = Style {
        delivery,
        explain: wants_explanation(headers),
        echo,
        logprobs: wishes.logprobs.is_some(),
    };
    let prepared = prompts
        .into_iter()
        .map(|prompt| gateway.prepare(model.clone(), prompt, wishes.clone(), arrived))
        .collect::<Result<_, _>>()?;
    Ok(Parsed { prepared, style })
}

async fn prompts(
    gateway: &Gateway,
    model: &Arc<Model>,
    field: Value,
    most: usize,
) -> Result<Vec<Vec<TokenId>>, Error> {
    let wrong = "prompt must be a string, a list of strings, a list of token ids, or a list of \
                 lists of token ids";
    if field.as_array().is_some_and(Vec::is_empty) {
        return Err(Error::invalid("prompt", "the list of prompts is empty"));
    }
    let field = serde_json::from_value(field).map_err(|_| Error::invalid("prompt", wrong))?;
    let count = match &field {
        PromptField::Text(_) | PromptField::Ids(_) => 1,
        PromptField::Texts(texts) => texts.len(),
        PromptField::ManyIds(many) => many.len(),
    };
    if count > PROMPTS_MAX {
        let message = format!("{count} prompts are too many: at most {PROMPTS_MAX}");
        return Err(Error::invalid("prompt", message));
    }
    match field {
        PromptField::Text(text) => gateway.encode(model, vec![text], most).await,
        PromptField::Texts(texts) => gateway.encode(model, texts, most).await,
        PromptField::Ids(ids) => Ok(vec![ids]),
        PromptField::ManyIds(many) => match many.iter().position(Vec::is_empty) {
            Some(at) => Err(Error::invalid("prompt", format!("prompt[{at}] has no tokens"))),
            None => Ok(many),
        },
    }
}

fn merge(answers: Vec<AnswerStream>) -> BoxStream<'static, Tagged> {
    let tagged = answers.into_iter().enumerate().map(|(prompt, answer)| {
        futures::stream::unfold(answer, move |mut answer| async move {
            let event = answer.next().await?;
            Some(((prompt, event), answer))
        })
        .boxed()
    });
    select_all(tagged).boxed()
}

/// All choices of all prompts.
struct ChoiceWriters {
    model: Arc<Model>,
    style: Style,
    choices_per_prompt: usize,
    prompts: Vec<Vec<TokenId>>,
    choices: Vec<ChoiceWriter>,
}

/// What has gathered since a choice was last written.
struct ChoiceWriter {
    text: String,
    ids: Vec<TokenId>,
    logprobs: CompletionLogprobs,
    reason: Option<FinishReason>,
    /// The prompt is written before the answer, once its log-probabilities are there.
    echo_due: bool,
}

impl ChoiceWriters {
    fn new(model: &Arc<Model>, prompts: &[Vec<TokenId>], choices: usize, style: Style) -> Self {
        let writers = (0..prompts.len() * choices).map(|_| ChoiceWriter {
            text: String::new(),
            ids: Vec::new(),
            logprobs: CompletionLogprobs::default(),
            reason: None,
            echo_due: style.echo,
        });
        Self {
            model: model.clone(),
            style,
            choices_per_prompt: choices,
            prompts: prompts.to_vec(),
            choices: writers.collect(),
        }
    }

    fn index(&self, prompt: usize, choice: u16) -> usize {
        prompt * self.choices_per_prompt + usize::from(choice)
    }

    fn take(&mut self, prompt: usize, event: AnswerEvent) {
        match event {
            AnswerEvent::Token { token, text } => {
                let at = self.index(prompt, token.choice);
                self.echo(prompt, at, None);
                let writer = &mut self.choices[at];
                writer.text.push_str(&text);
                writer.ids.push(token.id);
                if self.style.logprobs {
                    let logprobs = token.logprobs.as_ref();
                    writer.logprobs.push(&self.model.tokenizer, token.id, logprobs);
                }
            }
            AnswerEvent::Finished { choice, reason, text } => {
                let at = self.index(prompt, choice);
                self.choices[at].text.push_str(&text);
                self.choices[at].reason = Some(reason);
            }
            AnswerEvent::PromptLogprobs(all) => {
                for choice in 0..self.choices_per_prompt {
                    let at = prompt * self.choices_per_prompt + choice;
                    self.echo(prompt, at, Some(&all));
                }
            }
            AnswerEvent::Done(_) | AnswerEvent::Failed(_) => {}
        }
    }

    /// Writes the prompt before the answer.
    fn echo(&mut self, prompt: usize, at: usize, logprobs: Option<&[TokenLogprobs]>) {
        let writer = &mut self.choices[at];
        if !std::mem::replace(&mut writer.echo_due, false) {
            return;
        }
        let tokenizer = &self.model.tokenizer;
        let ids = &self.prompts[prompt];
        writer.text.insert_str(0, &tokenizer.decode(ids));
        if self.style.logprobs {
            for (position, &id) in ids.iter().enumerate() {
                let one = position.checked_sub(1).and_then(|before| logprobs?.get(before));
                writer.logprobs.push(tokenizer, id, one);
            }
        }
    }

    fn into_choices(mut self) -> Vec<Value> {
        (0..self.choices.len()).map(|at| self.write(at)).collect()
    }

    /// What a choice has gathered, as JSON; it gathers anew after that.
    fn write(&mut self, at: usize) -> Value {
        let writer = &mut self.choices[at];
        let offset = writer.logprobs.offset();
        let logprobs =
            std::mem::replace(&mut writer.logprobs, CompletionLogprobs::at(offset)).into_json();
        let mut choice = json!({
            "index": at,
            "text": std::mem::take(&mut writer.text),
            "logprobs": if self.style.logprobs { logprobs } else { Value::Null },
            "finish_reason": writer.reason.map(FinishReason::as_str),
        });
        let ids = std::mem::take(&mut writer.ids);
        if self.style.delivery.return_token_ids {
            choice["token_ids"] = json!(ids);
        }
        choice
    }

    /// Whether a choice has anything to write.
    fn is_due(&self, at: usize) -> bool {
        let writer = &self.choices[at];
        let silent = !self.style.logprobs && !self.style.delivery.return_token_ids;
        !writer.text.is_empty() || writer.reason.is_some() || (!silent && !writer.ids.is_empty())
    }
}

/// Writes the stream; ends, and so cancels the requests, when the client has gone.
async fn write(
    chunks: Chunks,
    identity: Identity,
    mut writers: ChoiceWriters,
    first: Option<Tagged>,
    mut events: BoxStream<'static, Tagged>,
) {
    let style = writers.style;
    let mut explains = Vec::new();
    let mut next = first;
    while let Some((prompt, event)) = next {
        let touched = match event {
            AnswerEvent::Failed(error) => return chunks.fail(&error).await,
            AnswerEvent::Done(explain) => {
                explains.push(*explain);
                None
            }
            event => {
                let choice = match &event {
                    AnswerEvent::Token { token, .. } => Some(token.choice),
                    AnswerEvent::Finished { choice, .. } => Some(*choice),
                    _ => None,
                };
                writers.take(prompt, event);
                choice.map(|choice| writers.index(prompt, choice))
            }
        };
        if let Some(at) = touched.filter(|&at| writers.is_due(at)) {
            let choice = writers.write(at);
            if !send(&chunks, &identity, style, vec![choice], None).await {
                return;
            }
        }
        next = tokio::select! {
            event = events.next() => event,
            () = chunks.closed() => return,
        };
    }
    if style.explain {
        let mut object = identity.object(Vec::new());
        object.insert("baton".into(), explain_json(&explains));
        if !chunks.send(object).await {
            return;
        }
    }
    if style.delivery.include_usage {
        let usage = total(explains.iter().map(Explain::usage));
        send(&chunks, &identity, style, Vec::new(), Some(usage)).await;
    }
}

async fn send(
    chunks: &Chunks,
    identity: &Identity,
    style: Style,
    choices: Vec<Value>,
    usage: Option<Usage>,
) -> bool {
    let mut object = identity.object(choices);
    if style.delivery.include_usage {
        object.insert("usage".into(), usage.map_or(Value::Null, |usage| usage_json(&usage)));
    }
    chunks.send(object).await
}
