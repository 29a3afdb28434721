//! Why a transfer fails.

use baton_types::{Error, ErrorCode, NumericsVersion};

use crate::frame::{FrameError, FrameKey};
use crate::grant::GrantError;
use crate::message::MessageError;

/// The failure of one transfer, named by cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// One message cannot be read; the stream goes on.
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error("{what} differs: the grant says {granted}, the peer has {peer}")]
    Mismatch { what: &'static str, granted: String, peer: String },
    /// Nothing else differs, and KV is not to be converted on its way.
    #[error(
        "the precision of KV differs: the grant says {granted}, the sender has {sender}; such \
         nodes work together where both, and the router, have kv_conversion = true"
    )]
    KvPrecision { granted: NumericsVersion, sender: NumericsVersion },
    #[error("no common protocol version: the peer offers {min} to {max}")]
    Version { min: u16, max: u16 },
    #[error("the peer gave up ({}): {message}", code.as_str())]
    PeerAborted { code: ErrorCode, message: String },
    #[error("nothing was heard from the peer for {silent_ms} ms")]
    PeerSilent { silent_ms: u64 },
    #[error("the stream to the peer has ended")]
    Closed,
    #[error("the request's deadline has passed during the transfer")]
    DeadlinePassed,
    #[error("nobody opened the grant in time")]
    GrantUnused,
    #[error("the request was cancelled")]
    Cancelled,
    #[error("a later attempt has replaced this transfer")]
    Superseded,
    #[error("a frame was corrupt twice ({0})")]
    Corrupt(FrameKey),
    #[error("the commit does not fit the frames: {frames} frames came, {committed} were sent")]
    Digest { frames: u32, committed: u32 },
    #[error("the commit has {got} first tokens for {choices} choices")]
    FirstTokens { got: usize, choices: u16 },
    #[error("the peer sent {bytes} bytes beyond its credit")]
    CreditExceeded { bytes: u64 },
    #[error("the span does not fit the grant: {0}")]
    Span(String),
    #[error("KV could not be placed: {0}")]
    Place(Error),
    #[error("the receiver takes KV over UCX only, as its kv_transport says")]
    GrpcForbidden,
    #[error("the peer at {peer} cannot be reached: {reason}")]
    Connect { peer: String, reason: String },
}

impl TransferError {
    /// Whether the peer, or the way to it, is at fault: it was not heard, or could not be reached.
    pub fn is_of_the_peer(&self) -> bool {
        matches!(self, Self::PeerSilent { .. } | Self::Closed | Self::Connect { .. })
    }

    /// Whether another try can help, and how the failure is shown outside.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Grant(GrantError::Expired { .. }) | Self::GrantUnused => ErrorCode::Unavailable,
            Self::Grant(GrantError::Mac) | Self::Mismatch { .. } | Self::Version { .. } => {
                ErrorCode::FailedPrecondition
            }
            Self::Superseded | Self::KvPrecision { .. } | Self::GrpcForbidden => {
                ErrorCode::FailedPrecondition
            }
            Self::Grant(GrantError::Decode(_)) | Self::Message(_) => ErrorCode::InvalidArgument,
            Self::PeerAborted { code, .. } => *code,
            Self::PeerSilent { .. } | Self::Closed | Self::Connect { .. } => ErrorCode::Unavailable,
            Self::DeadlinePassed => ErrorCode::DeadlineExceeded,
            Self::Cancelled => ErrorCode::Cancelled,
            Self::Corrupt(_) | Self::Digest { .. } => ErrorCode::DataLoss,
            Self::FirstTokens { .. } | Self::CreditExceeded { .. } | Self::Span(_) => {
                ErrorCode::Internal
            }
            Self::Place(error) => error.code,
        }
    }
}

impl From<TransferError> for Error {
    fn from(error: TransferError) -> Self {
        Error::new(error.code(), error.to_string())
    }
}

impl From<FrameError> for TransferError {
    fn from(error: FrameError) -> Self {
        Self::Message(error.into())
    }
}
