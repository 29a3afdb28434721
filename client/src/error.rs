//! What can go wrong for a caller.

use baton_types::{Error, ErrorCode};

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("the endpoint {0:?} is none; give http://host:port or https://host:port")]
    Endpoint(String),
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    /// Baton's own error; `code` says whether another try can help.
    #[error("{}: {}{}", .0.code.as_str(), .0.message, field_suffix(.0))]
    Baton(Error),
}

fn field_suffix(error: &Error) -> String {
    error.field.as_ref().map_or_else(String::new, |field| format!(" (field {field})"))
}

impl ClientError {
    pub fn code(&self) -> ErrorCode {
        match self {
            ClientError::Endpoint(_) | ClientError::Tls(_) => ErrorCode::InvalidArgument,
            ClientError::Baton(error) => error.code,
        }
    }
}

impl From<tonic::Status> for ClientError {
    fn from(status: tonic::Status) -> Self {
        ClientError::Baton(baton_proto::error::from_status(&status))
    }
}
