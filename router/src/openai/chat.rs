//! `/v1/chat/completions`.

use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use baton_tokenizer::{ChatMessage, ChatOptions};
use baton_types::{Error, ErrorCode, FinishReason, TokenId, Usage};
use serde_json::{Map, Value, json};
use tracing::Instrument;

use super::body::Fields;
use super::error::ApiError;
use super::logprobs::chat_entry;
use super::reply::{
    Chunks, Identity, event_stream, explain_json, usage_json, wants_explanation, with_request_id,
};
use super::wishes::{self, Delivery};
use crate::answer::{AnswerEvent, AnswerStream};
use crate::catalog::Model;
use crate::dispatch::Explain;
use crate::gateway::{Gateway, Prepared, Wishes};

/// As everywhere; here the field has another name than in the other APIs.
const TOP_LOGPROBS_MAX: u32 = 20;

pub(super) async fn create(
    State(gateway): State<Gateway>,
    headers: HeaderMap,
    fields: Fields,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let (prepared, delivery) = parse(&gateway, fields, arrived).await?;
    let explain = wants_explanation(&headers);
    let model = prepared.model.clone();
    let choices = prepared.request.choices;
    let request_id = prepared.request.id.to_string();
    let mut answer = gateway.run(prepared).await?;
    if delivery.stream {
        // What fails before the first event still has its own status.
        let first = answer.next().await;
        if let Some(AnswerEvent::Failed(error)) = first {
            return Err(error.into());
        }
        let (chunks, response) = event_stream(&request_id);
        let identity = Identity::new("chatcmpl", &request_id, "chat.completion.chunk", &model);
        let writer = ChatWriter { identity, model, delivery, explain, chunks };
        let span = tracing::info_span!("stream", request_id);
        tokio::spawn(writer.write(answer, first, choices).instrument(span));
        return Ok(response);
    }
    let identity = Identity::new("chatcmpl", &request_id, "chat.completion", &model);
    let (choices, account) = collect(&mut answer, &model, choices, delivery).await?;
    let mut object = identity.object(choices);
    object.insert("usage".into(), usage_json(&account.usage()));
    if explain {
        object.insert("baton".into(), explain_json(std::slice::from_ref(&account)));
    }
    Ok(with_request_id(&request_id, Json(object)))
}

async fn parse(
    gateway: &Gateway,
    mut fields: Fields,
    arrived: Instant,
) -> Result<(Prepared, Delivery), Error> {
    let name: String = fields.require("model")?;
    let model = gateway.model(&name)?;
    let messages = messages(fields.require("messages")?)?;
    let options = chat_options(&mut fields)?;
    let (mut wishes, delivery) = wishes::take(&mut fields)?;
    take_chat_limits(&mut fields, &mut wishes)?;
    fields.finish()?;
    Ok((gateway.prepare_chat(model, messages, options, wishes, arrived).await?, delivery))
}

fn chat_options(fields: &mut Fields) -> Result<ChatOptions, Error> {
    let continue_final_message = fields.take("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt =
        fields.take("add_generation_prompt")?.unwrap_or(!continue_final_message);
    if add_generation_prompt && continue_final_message {
        let message = "continue_final_message excludes add_generation_prompt";
        return Err(Error::invalid("continue_final_message", message));
    }
    let extra: Option<Map<String, Value>> = fields.take("chat_template_kwargs")?;
    Ok(ChatOptions {
        add_generation_prompt,
        continue_final_message,
        extra: extra.unwrap_or_default(),
    })
}

fn take_chat_limits(fields: &mut Fields, wishes: &mut Wishes) -> Result<(), Error> {
    let newer: Option<u32> = fields.take("max_completion_tokens")?;
    if newer.is_some() && wishes.max_tokens.is_some() && newer != wishes.max_tokens {
        let message = "max_tokens and max_completion_tokens differ; give one of them";
        return Err(Error::invalid("max_completion_tokens", message));
    }
    wishes.max_tokens = newer.or(wishes.max_tokens);
    let logprobs = fields.take("logprobs")?.unwrap_or(false);
    let top: Option<u32> = fields.take("top_logprobs")?;
    if top.is_some_and(|top| top > 0) && !logprobs {
        return Err(Error::invalid("top_logprobs", "top_logprobs go with logprobs: true only"));
    }
    if let Some(top) = top.filter(|&top| top > TOP_LOGPROBS_MAX) {
        let message = format!("{top} is out of bounds: top_logprobs is 0 to {TOP_LOGPROBS_MAX}");
        return Err(Error::invalid("top_logprobs", message));
    }
    wishes.logprobs = logprobs.then(|| top.unwrap_or(0));
    Ok(())
}

fn messages(raw: Vec<Value>) -> Result<Vec<ChatMessage>, Error> {
    raw.into_iter().enumerate().map(|(at, message)| one_message(at, message)).collect()
}

fn one_message(at: usize, message: Value) -> Result<ChatMessage, Error> {
    let path = |field: &str| format!("messages[{at}].{field}");
    let Value::Object(mut message) = message else {
        let what = "each message is an object with role and content";
        return Err(Error::invalid(format!("messages[{at}]"), what));
    };
    let mut text = |field: &str| match message.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::invalid(path(field), format!("{field} must be a string"))),
    };
    let role = text("role")?
        .filter(|role| !role.is_empty())
        .ok_or_else(|| Error::invalid(path("role"), "role is missing"))?;
    let name = text("name")?;
    let content = match message.remove("content") {
        Some(Value::String(content)) => content,
        Some(Value::Array(parts)) => joined_parts(at, parts)?,
        None | Some(Value::Null) => {
            return Err(Error::invalid(path("content"), "content is missing"));
        }
        Some(_) => {
            let what = "content must be a string or a list of text parts";
            return Err(Error::invalid(path("content"), what));
        }
    };
    if let Some((field, _)) =
        message.iter().find(|(field, value)| *field != "refusal" && !value.is_null())
    {
        let what = format!("{field} is not supported in a message");
        return Err(Error { field: Some(path(field)), ..Error::new(ErrorCode::Unsupported, what) });
    }
    Ok(ChatMessage { role, content, name })
}

fn joined_parts(at: usize, parts: Vec<Value>) -> Result<String, Error> {
    let texts = parts.iter().enumerate().map(|(part_at, part)| {
        let text = part.get("text").and_then(Value::as_str);
        match (part.get("type").and_then(Value::as_str), text) {
            (Some("text"), Some(text)) => Ok(text),
            (Some("text"), None) => Err(Error::invalid(
                format!("messages[{at}].content[{part_at}].text"),
                "a text part has a string `text`",
            )),
            (kind, _) => Err(Error {
                field: Some(format!("messages[{at}].content[{part_at}].type")),
                ..Error::new(
                    ErrorCode::Unsupported,
                    format!("only text parts are supported, not {:?}", kind.unwrap_or("none")),
                )
            }),
        }
    });
    texts.collect()
}

#[derive(Default)]
struct Collected {
    text: String,
    logprobs: Vec<Value>,
    ids: Vec<TokenId>,
    reason: Option<FinishReason>,
}

/// Reads the whole answer.
async fn collect(
    answer: &mut AnswerStream,
    model: &Model,
    choices: u16,
    delivery: Delivery,
) -> Result<(Vec<Value>, Explain), Error> {
    let mut collected: Vec<Collected> = (0..choices).map(|_| Collected::default()).collect();
    while let Some(event) = answer.next().await {
        match event {
            AnswerEvent::Token { token, text } => {
                let choice = &mut collected[usize::from(token.choice)];
                choice.text.push_str(&text);
                choice.ids.push(token.id);
                choice.logprobs.extend(chat_entry(&model.tokenizer, &token));
            }
            AnswerEvent::Finished { choice, reason, text } => {
                let choice = &mut collected[usize::from(choice)];
                choice.text.push_str(&text);
                choice.reason = Some(reason);
            }
            AnswerEvent::PromptLogprobs(_) => {}
            AnswerEvent::Done(explain) => {
                let choices = collected.into_iter().enumerate();
                let choices = choices.map(|(index, choice)| choice.into_json(index, delivery));
                return Ok((choices.collect(), *explain));
            }
            AnswerEvent::Failed(error) => return Err(error),
        }
    }
    Err(Error::internal("the answer ended without a last word"))
}

impl Collected {
    fn into_json(self, index: usize, delivery: Delivery) -> Value {
        let logprobs =
            (!self.logprobs.is_empty()).then(|| json!({"content": self.logprobs, "refusal": null}));
        let mut choice = json!({
            "index": index,
            "message": {"role": "assistant", "content": self.text, "refusal": null},
            "logprobs": logprobs,
            "finish_reason": self.reason.map(FinishReason::as_str),
        });
        if delivery.return_token_ids {
            choice["token_ids"] = json!(self.ids);
        }
        choice
    }
}

struct ChatWriter {
    identity: Identity,
    model: std::sync::Arc<Model>,
    delivery: Delivery,
    explain: bool,
    chunks: Chunks,
}

impl ChatWriter {
    /// Writes the stream; ends, and so cancels the request, when the client has gone.
    async fn write(self, mut answer: AnswerStream, first: Option<AnswerEvent>, choices: u16) {
        for index in 0..choices {
            let delta = json!({"role": "assistant", "content": "", "refusal": null});
            if !self.send(vec![choice_chunk(index, delta, None, None)], None).await {
                return;
            }
        }
        let mut event = first;
        while let Some(next) = event {
            if !self.event(next).await {
                return;
            }
            event = tokio::select! {
                event = answer.next() => event,
                () = self.chunks.closed() => return,
            };
        }
    }

    /// False where nothing more is to be written.
    async fn event(&self, event: AnswerEvent) -> bool {
        match event {
            AnswerEvent::Token { token, text } => {
                let entry = chat_entry(&self.model.tokenizer, &token);
                if text.is_empty() && entry.is_none() && !self.delivery.return_token_ids {
                    return true;
                }
                let logprobs = entry.map(|entry| json!({"content": [entry], "refusal": null}));
                let mut choice =
                    choice_chunk(token.choice, json!({"content": text}), logprobs, None);
                if self.delivery.return_token_ids {
                    choice["token_ids"] = json!([token.id]);
                }
                self.send(vec![choice], None).await
            }
            AnswerEvent::Finished { choice, reason, text } => {
                let delta = if text.is_empty() { json!({}) } else { json!({"content": text}) };
                self.send(vec![choice_chunk(choice, delta, None, Some(reason))], None).await
            }
            AnswerEvent::PromptLogprobs(_) => true,
            AnswerEvent::Done(explain) => {
                self.done(&explain).await;
                false
            }
            AnswerEvent::Failed(error) => {
                self.chunks.fail(&error).await;
                false
            }
        }
    }

    async fn done(&self, explain: &Explain) {
        if self.explain {
            let mut object = self.identity.object(Vec::new());
            object.insert("baton".into(), explain_json(std::slice::from_ref(explain)));
            if !self.chunks.send(object).await {
                return;
            }
        }
        if self.delivery.include_usage {
            self.send(Vec::new(), Some(explain.usage())).await;
        }
    }

    async fn send(&self, choices: Vec<Value>, usage: Option<Usage>) -> bool {
        let mut object = self.identity.object(choices);
        if self.delivery.include_usage {
            object.insert("usage".into(), usage.map_or(Value::Null, |usage| usage_json(&usage)));
        }
        self.chunks.send(object).await
    }
}

fn choice_chunk(
    index: u16,
    delta: Value,
    logprobs: Option<Value>,
    reason: Option<FinishReason>,
) -> Value {
    json!({
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": reason.map(FinishReason::as_str),
    })
}
