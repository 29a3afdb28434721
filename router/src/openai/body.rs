//! A request's JSON, field by field: each is taken out once, and what is left over is an error,
//! so that nothing which would change the result is ever ignored.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use baton_types::{Error, ErrorCode};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::strict::Strict;
use crate::gateway::Gateway;

/// The field of errors about a body over `max_request_bytes`; they have a status of their own.
pub(super) const TOO_LARGE: &str = "body size";

/// A client that takes longer to send its body is given up.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Fields that change nothing about the answer.
const HARMLESS: [&str; 7] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];

/// Fields of OpenAI's API that would change the answer and that Baton does not do.
const UNSUPPORTED: [&str; 15] = [
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "modalities",
    "audio",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "parallel_tool_calls",
    "suffix",
    "best_of",
    "moderation",
];

pub(super) struct Fields(Map<String, Value>);

impl FromRequest<Gateway> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, gateway: &Gateway) -> Result<Self, ApiError> {
        let headers = request.headers().clone();
        let body = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, gateway)).await;
        let body = body.map_err(|_| {
            let message = format!("the body did not come within {} s", BODY_TIMEOUT.as_secs());
            Error::invalid("body", message)
        })?;
        let body = body.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => {
                let most = gateway.config.max_request_bytes;
                let message =
                    format!("the body has more than the router's max_request_bytes, {most} bytes");
                Error::invalid(TOO_LARGE, message)
            }
            _ => Error::invalid("body", format!("the body did not come: {rejection}")),
        })?;
        Ok(Self::parse(&headers, &body)?)
    }
}

impl Fields {
    /// # Errors
    /// Where the body is no JSON object, has a field twice, or says that it is something else.
    fn parse(headers: &HeaderMap, body: &[u8]) -> Result<Self, Error> {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with("application/json")) {
            let message = "the body must be JSON, with `content-type: application/json`";
            return Err(Error::invalid("content-type", message));
        }
        match serde_json::from_slice(body) {
            Ok(Strict(Value::Object(fields))) => Ok(Self(fields)),
            Ok(_) => Err(Error::invalid("body", "the body must be a JSON object")),
            Err(error) if error.is_data() => {
                Err(Error::invalid("body", format!("the body cannot be taken: {error}")))
            }
            Err(error) => Err(Error::invalid("body", format!("the body is no JSON: {error}"))),
        }
    }

    /// Takes a field out; `null` is as good as absent.
    ///
    /// # Errors
    /// Where its type is wrong.
    pub fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, Error> {
        match self.0.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|error| Error::invalid(field, format!("{field}: {}", in_words(&error)))),
        }
    }

    /// # Errors
    /// As [`take`](Self::take), and where it is absent.
    pub fn require<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, Error> {
        self.take(field)?
            .ok_or_else(|| Error::invalid(field, format!("the field {field} is missing")))
    }

    /// Checks what nobody has taken.
    ///
    /// # Errors
    /// `Unsupported` or `InvalidArgument`, with the field named.
    pub fn finish(self) -> Result<(), Error> {
        for (field, value) in self.0 {
            let field = field.as_str();
            if HARMLESS.contains(&field) || is_neutral(field, &value) {
                continue;
            }
            let (code, message) = if UNSUPPORTED.contains(&field) {
                (ErrorCode::Unsupported, format!("{field} is not supported; leave it out"))
            } else {
                (ErrorCode::InvalidArgument, format!("there is no field {field}; leave it out"))
            };
            return Err(Error { field: Some(field.into()), ..Error::new(code, message) });
        }
        Ok(())
    }
}

/// Serde names types as Rust does.
fn in_words(error: &serde_json::Error) -> String {
    let mut words = error.to_string();
    for (rust, plain) in [
        ("expected u32", "expected a whole number from 0 to 4294967295"),
        ("expected u64", "expected a whole number of 0 or more"),
        ("expected i64", "expected a whole number"),
        ("expected f32", "expected a number"),
    ] {
        words = words.replace(rust, plain);
    }
    words
}

/// Values that ask for what happens anyway.
fn is_neutral(field: &str, value: &Value) -> bool {
    match field {
        _ if value.is_null() => UNSUPPORTED.contains(&field),
        "tools" | "functions" => value.as_array().is_some_and(Vec::is_empty),
        "tool_choice" | "function_call" => value == "none" || value == "auto",
        "response_format" => value.get("type").is_some_and(|kind| kind == "text"),
        "modalities" => value.as_array().is_some_and(|all| all.iter().all(|one| one == "text")),
        "parallel_tool_calls" => value.is_boolean(),
        "best_of" => value == 1,
        "suffix" => value == "",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        match value {
            Value::Object(fields) => Fields(fields),
            _ => unreachable!("tests give objects"),
        }
    }

    #[test]
    fn left_over_fields_are_named() {
        let unknown = fields(json!({"temprature": 1})).finish().unwrap_err();
        assert_eq!(unknown.field.as_deref(), Some("temprature"));
        assert_eq!(unknown.code, ErrorCode::InvalidArgument);
        let unsupported = fields(json!({"tools": [{"type": "function"}]})).finish().unwrap_err();
        assert_eq!(unsupported.code, ErrorCode::Unsupported);
        let harmless = json!({"user": "u", "tools": [], "response_format": {"type": "text"}});
        assert!(fields(harmless).finish().is_ok());
    }

    #[test]
    fn a_field_given_twice_is_named() {
        let headers = [(header::CONTENT_TYPE, "application/json".parse().unwrap())];
        let headers = HeaderMap::from_iter(headers);
        let parse = |body: &str| Fields::parse(&headers, body.as_bytes()).map(|_| ());
        let twice = parse(r#"{"seed": 1, "n": 2, "seed": 3}"#).unwrap_err();
        assert!(twice.message.contains("seed"), "{}", twice.message);
        assert!(parse("[1]").unwrap_err().message.contains("object"));
        assert!(parse("{").unwrap_err().message.contains("no JSON"));
        assert!(parse(r#"{"seed": 1}"#).is_ok());
    }

    #[test]
    fn wrong_types_name_the_field() {
        let error = fields(json!({"n": "three"})).take::<u32>("n").unwrap_err();
        assert_eq!(error.field.as_deref(), Some("n"));
        assert!(error.message.contains("three"), "{}", error.message);
        assert!(fields(json!({})).require::<u32>("n").is_err());
        assert_eq!(fields(json!({"n": null})).take::<u32>("n").unwrap(), None);
    }
}
