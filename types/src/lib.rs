//! The words that every crate of Baton shares: identifiers, the one `GenerateRequest`, the one
//! `SamplingParams`, the shape of a model and of its KV cache, and `ErrorCode`.
//!
//! It owns meaning and validation. It does no I/O, knows no async and no wire format.

#![forbid(unsafe_code)]

mod artifacts;
mod error;
mod ids;
mod kv;
mod model;
mod request;
mod response;
mod streaming;

pub use artifacts::{GgufVocab, ModelArtifacts, TokenizerSource};
pub use error::{Error, ErrorCode};
pub use ids::{
    BlockHash, BlockId, Epoch, Incarnation, ModelFingerprint, NodeId, NumericsVersion, RequestId,
    TokenId, TransferId,
};
pub use kv::{HASH_UNIT_TOKENS, KvDtype, KvLayout, UnknownKvDtype};
pub use model::{
    Activation, Experts, ModelFamily, ModelFeatures, ModelSpec, RopeScaling, RopeSpec,
    SlidingWindow,
};
pub use request::{DEADLINE_MAX_MS, GenerateRequest, Limits, SamplingParams, StopParams};
pub use response::{FinishReason, TokenLogprobs, TokenOutput, Usage};
pub use streaming::{STREAMING_TOKENS_MAX, StreamingAttention, context_most};
