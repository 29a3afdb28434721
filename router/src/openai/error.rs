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
        ErrorCode::ResourceExhausted if never_fits(error) => "invalid_request_error",
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
            _ if never_fits(&self.0) => StatusCode::BAD_REQUEST,
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

/// Whether no node can ever hold the request, so that trying again does not help.
fn never_fits(error: &Error) -> bool {
    error.code == ErrorCode::ResourceExhausted && error.retry_after_ms.is_none()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_fits_is_no_rate_limit() {
        let full = Error::new(ErrorCode::ResourceExhausted, "no blocks");
        let busy = Error { retry_after_ms: Some(1), ..full.clone() };
        let cases = [(full, 400, "invalid_request_error"), (busy, 429, "rate_limit_error")];
        for (error, status, kind) in cases {
            assert_eq!(to_json(&error)["error"]["type"], kind);
            assert_eq!(ApiError(error).into_response().status(), status);
        }
    }
}
