//! The one map: `ErrorCode` ↔ gRPC status ↔ HTTP status.
//!
//! gRPC metadata carries what a status code cannot: the exact code, the field at fault and when
//! to try again.

use baton_types::{Error, ErrorCode};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

pub const CODE_KEY: &str = "baton-error-code";
pub const FIELD_KEY: &str = "baton-error-field";
pub const RETRY_AFTER_KEY: &str = "baton-retry-after-ms";

/// The field that `Prefill.Run` names where the decode node, or the way to it, is what failed.
pub const DECODE_ADDRESS_FIELD: &str = "decode_address";

/// The gRPC code for an `ErrorCode`.
pub fn grpc_code(code: ErrorCode) -> Code {
    match code {
        ErrorCode::InvalidArgument => Code::InvalidArgument,
        ErrorCode::NotFound => Code::NotFound,
        ErrorCode::ResourceExhausted => Code::ResourceExhausted,
        ErrorCode::Unavailable => Code::Unavailable,
        ErrorCode::DeadlineExceeded => Code::DeadlineExceeded,
        ErrorCode::Cancelled => Code::Cancelled,
        ErrorCode::FailedPrecondition => Code::FailedPrecondition,
        ErrorCode::DataLoss => Code::DataLoss,
        ErrorCode::Unsupported => Code::Unimplemented,
        ErrorCode::Internal => Code::Internal,
    }
}

/// The HTTP status for an `ErrorCode`.
pub fn http_status(code: ErrorCode) -> u16 {
    match code {
        ErrorCode::InvalidArgument => 400,
        ErrorCode::NotFound => 404,
        ErrorCode::ResourceExhausted => 429,
        ErrorCode::Unavailable => 503,
        ErrorCode::DeadlineExceeded => 504,
        ErrorCode::Cancelled => 499,
        ErrorCode::FailedPrecondition => 409,
        ErrorCode::DataLoss => 502,
        ErrorCode::Unsupported => 501,
        ErrorCode::Internal => 500,
    }
}

/// The `ErrorCode` for a gRPC code of whatever origin.
pub fn from_grpc_code(code: Code) -> ErrorCode {
    match code {
        Code::InvalidArgument | Code::OutOfRange => ErrorCode::InvalidArgument,
        Code::NotFound => ErrorCode::NotFound,
        Code::ResourceExhausted => ErrorCode::ResourceExhausted,
        Code::Unavailable => ErrorCode::Unavailable,
        Code::DeadlineExceeded => ErrorCode::DeadlineExceeded,
        Code::Cancelled => ErrorCode::Cancelled,
        Code::FailedPrecondition | Code::AlreadyExists | Code::Aborted => {
            ErrorCode::FailedPrecondition
        }
        Code::DataLoss => ErrorCode::DataLoss,
        Code::Unimplemented => ErrorCode::Unsupported,
        Code::Ok
        | Code::Unknown
        | Code::Internal
        | Code::PermissionDenied
        | Code::Unauthenticated => ErrorCode::Internal,
    }
}

/// Puts an error on the wire.
pub fn to_status(error: &Error) -> Status {
    let mut metadata = MetadataMap::new();
    metadata.insert(CODE_KEY, MetadataValue::from_static(error.code.as_str()));
    if let Some(field) = error.field.as_deref().and_then(|field| field.parse().ok()) {
        metadata.insert(FIELD_KEY, field);
    }
    if let Some(ms) = error.retry_after_ms {
        metadata.insert(RETRY_AFTER_KEY, MetadataValue::from(ms));
    }
    Status::with_metadata(grpc_code(error.code), error.message.clone(), metadata)
}

/// Takes an error off the wire.
///
/// A status without our metadata comes from the transport. A stream that broke there says
/// `Unknown`, `Internal` or `Cancelled` as the case may be, and means that the peer is gone.
pub fn from_status(status: &Status) -> Error {
    let text = |key: &str| status.metadata().get(key).and_then(|value| value.to_str().ok());
    let named = text(CODE_KEY)
        .and_then(|name| ErrorCode::ALL.into_iter().find(|code| code.as_str() == name));
    let code = named.unwrap_or(match status.code() {
        Code::Unknown | Code::Internal | Code::Cancelled => ErrorCode::Unavailable,
        code => from_grpc_code(code),
    });
    Error {
        code,
        message: status.message().to_string(),
        field: text(FIELD_KEY).map(str::to_string),
        retry_after_ms: text(RETRY_AFTER_KEY).and_then(|ms| ms.parse().ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_wire() {
        for code in ErrorCode::ALL {
            let error = Error {
                code,
                message: "what happened".into(),
                field: Some("messages[2].role".into()),
                retry_after_ms: Some(1_500),
            };
            assert_eq!(from_status(&to_status(&error)), error);
            assert_eq!(from_grpc_code(grpc_code(code)), code);
            assert!((400..600).contains(&http_status(code)));
        }
    }

    #[test]
    fn a_broken_stream_means_that_the_peer_is_gone() {
        for code in [Code::Unknown, Code::Internal, Code::Cancelled, Code::Unavailable] {
            let error = from_status(&Status::new(code, "h2 protocol error"));
            assert_eq!(error.code, ErrorCode::Unavailable);
        }
    }
}
