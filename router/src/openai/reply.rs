//! What both endpoints' replies have in common: identity, usage, explanation, server-sent events.

use std::convert::Infallible;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use baton_types::{Error, Usage};
use futures::Stream;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::error::to_json;
use crate::catalog::Model;
use crate::dispatch::Explain;

/// Chunks that wait for a slow client; more hold the request back.
const CHUNKS_MAX: usize = 64;

pub(super) const EXPLAIN_HEADER: &str = "x-baton-explain";
const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// Whether the caller wants the explanation.
pub(super) fn wants_explanation(headers: &HeaderMap) -> bool {
    headers.get(EXPLAIN_HEADER).is_some_and(|value| value == "1" || value == "true")
}

/// What every object of one reply repeats.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    fingerprint: String,
}

impl Identity {
    pub fn new(prefix: &str, request_id: &str, object: &'static str, model: &Model) -> Self {
        Self {
            id: format!("{prefix}-{request_id}"),
            object,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
            model: model.spec.name.clone(),
            fingerprint: format!("fp_{}", &model.fingerprint.to_string()[..12]),
        }
    }

    /// An object with these choices.
    pub fn object(&self, choices: Vec<Value>) -> Map<String, Value> {
        let value = json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        });
        match value {
            Value::Object(object) => object,
            _ => unreachable!("json! of braces is an object"),
        }
    }
}

pub(super) fn usage_json(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}

/// Sums of several prompts' usage.
pub(super) fn total(usages: impl Iterator<Item = Usage>) -> Usage {
    usages.fold(Usage::default(), |sum, usage| Usage {
        prompt_tokens: sum.prompt_tokens + usage.prompt_tokens,
        completion_tokens: sum.completion_tokens + usage.completion_tokens,
        cached_tokens: sum.cached_tokens + usage.cached_tokens,
    })
}

/// The explanations, as the replies carry them under `baton`.
pub(super) fn explain_json(explains: &[Explain]) -> Value {
    match explains {
        [one] => json!(one),
        many => json!(many),
    }
}

/// A running stream's source of chunks.
#[derive(Debug)]
pub(super) struct Chunks(mpsc::Sender<Value>);

impl Chunks {
    /// False where the client has gone.
    pub async fn send(&self, chunk: impl Into<Value>) -> bool {
        self.0.send(chunk.into()).await.is_ok()
    }

    /// The error that ends the stream, in OpenAI's shape.
    pub async fn fail(&self, error: &Error) {
        // The client may have gone.
        let _unheard = self.0.send(to_json(error)).await;
    }

    /// Returns when the client has gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// A stream of server-sent events: one for each chunk, then `[DONE]`.
pub(super) fn event_stream(request_id: &str) -> (Chunks, Response) {
    let (sender, receiver) = mpsc::channel(CHUNKS_MAX);
    let response = Sse::new(events(receiver)).keep_alive(KeepAlive::default());
    (Chunks(sender), with_request_id(request_id, response))
}

fn events(receiver: mpsc::Receiver<Value>) -> impl Stream<Item = Result<Event, Infallible>> {
    use futures::StreamExt;
    let done = futures::stream::once(async { Event::default().data("[DONE]") });
    ReceiverStream::new(receiver)
        .map(|chunk| Event::default().data(chunk.to_string()))
        .chain(done)
        .map(Ok)
}

/// Names the request to its caller, as the logs name it.
pub(super) fn with_request_id(request_id: &str, response: impl IntoResponse) -> Response {
    let mut response = response.into_response();
    if let Ok(id) = HeaderValue::from_str(request_id) {
        response.headers_mut().insert(REQUEST_ID_HEADER, id);
    }
    response
}
