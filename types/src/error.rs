//! The ten ways in which something can fail, and whether trying again can help.

use serde::{Deserialize, Serialize};

/// What kind of failure it is. `proto` maps each to one gRPC status and one HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request itself is wrong; the field is named. Never retried.
    InvalidArgument,
    /// The model, request or transfer that was named does not exist here.
    NotFound,
    /// No room: queue, blocks or grants. Retry after `retry_after_ms`.
    ResourceExhausted,
    /// The node cannot be reached, is draining or went away. Retry elsewhere.
    Unavailable,
    /// The request's own deadline has passed.
    DeadlineExceeded,
    /// Whoever asked has gone or has cancelled.
    Cancelled,
    /// Two sides do not fit: model fingerprint, numerics version, epoch, incarnation, layout.
    FailedPrecondition,
    /// A checksum or digest does not fit; the data was thrown away.
    DataLoss,
    /// Valid, but this build or model cannot do it.
    Unsupported,
    /// A bug of ours, or NaN from the model.
    Internal,
}

impl ErrorCode {
    pub const ALL: [ErrorCode; 10] = [
        ErrorCode::InvalidArgument,
        ErrorCode::NotFound,
        ErrorCode::ResourceExhausted,
        ErrorCode::Unavailable,
        ErrorCode::DeadlineExceeded,
        ErrorCode::Cancelled,
        ErrorCode::FailedPrecondition,
        ErrorCode::DataLoss,
        ErrorCode::Unsupported,
        ErrorCode::Internal,
    ];

    /// Whether the same request may succeed when it is sent again, here or elsewhere.
    pub fn is_retryable(self) -> bool {
        matches!(self, ErrorCode::ResourceExhausted | ErrorCode::Unavailable | ErrorCode::DataLoss)
    }

    /// The stable name in logs, metrics and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorCode::InvalidArgument => "invalid_argument",
            ErrorCode::NotFound => "not_found",
            ErrorCode::ResourceExhausted => "resource_exhausted",
            ErrorCode::Unavailable => "unavailable",
            ErrorCode::DeadlineExceeded => "deadline_exceeded",
            ErrorCode::Cancelled => "cancelled",
            ErrorCode::FailedPrecondition => "failed_precondition",
            ErrorCode::DataLoss => "data_loss",
            ErrorCode::Unsupported => "unsupported",
            ErrorCode::Internal => "internal",
        }
    }
}

/// The failure of one request, as it crosses crates and the wire.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Error {
    pub code: ErrorCode,
    /// Says what is wrong and what to do about it.
    pub message: String,
    /// The request's field at fault, in the caller's own spelling.
    pub field: Option<String>,
    /// When to try again; only with `ResourceExhausted` and `Unavailable`.
    pub retry_after_ms: Option<u64>,
}

impl Error {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), field: None, retry_after_ms: None }
    }

    /// A request that is wrong in `field`.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: Some(field.into()), ..Self::new(ErrorCode::InvalidArgument, message) }
    }

    /// No room now; the caller should come back after `retry_after_ms`.
    pub fn exhausted(message: impl Into<String>, retry_after_ms: u64) -> Self {
        Self {
            retry_after_ms: Some(retry_after_ms),
            ..Self::new(ErrorCode::ResourceExhausted, message)
        }
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unavailable, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, message)
    }
}
