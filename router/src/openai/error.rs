//! Errors in OpenAI's shape.

use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use baton_proto::error::http_status;
use baton_types::{Error, ErrorCode};
use serde_json::{Value, json};

use super::body::TOO_LARGE;

/// An error on its way to an HTTP client.
#[derive(Debug)]
pub(super) struct ApiError(pub Error);

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

/// `{"error": {message, type, param, code}}`.
pub(super) fn to_json(error: &Error) -> Value {
    let kind = match error.code {
        ErrorCode::InvalidArgument | ErrorCode::NotFound | ErrorCode::Unsupported => {
            "invalid_request_error"
        }
        ErrorCode::ResourceExhausted => "rate_limit_error",
        _ => "server_error",
    };
    let code = match (error.code, error.field.as_deref()) {
        (ErrorCode::NotFound, Some("model")) => "model_not_found",
        (code, _) => code.as_str(),
    };
    json!({"error": {
        "message": error.message,
        "type": kind,
        "param": error.field,
        "code": code,
    }})
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        // A feature that is not there is the caller's to leave out.
        let status = match self.0.code {
            ErrorCode::Unsupported => StatusCode::BAD_REQUEST,
            // What no node can ever hold: trying again does not help.
            ErrorCode::ResourceExhausted if self.0.retry_after_ms.is_none() => {
                StatusCode::BAD_REQUEST
            }
            _ if self.0.field.as_deref() == Some(TOO_LARGE) => StatusCode::PAYLOAD_TOO_LARGE,
            code => {
                StatusCode::from_u16(http_status(code)).expect("the error map holds valid statuses")
            }
        };
        let mut response = (status, Json(to_json(&self.0))).into_response();
        if let Some(ms) = self.0.retry_after_ms {
            let seconds = HeaderValue::from(ms.div_ceil(1_000));
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        response
    }
}

pub(super) async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    let message =
        format!("there is no {method} {}; see docs/openai.md for what there is", uri.path());
    ApiError(Error::new(ErrorCode::NotFound, message))
}

pub(super) async fn wrong_method(method: Method, uri: Uri) -> Response {
    let message = format!("{} does not take {method}", uri.path());
    let error = Error::new(ErrorCode::InvalidArgument, message);
    (StatusCode::METHOD_NOT_ALLOWED, Json(to_json(&error))).into_response()
}
