//! The wire forms: generated code of the `.proto` files, conversions to and from crate `types`,
//! and the one map between `ErrorCode`, gRPC status and HTTP status.
//!
//! It holds no logic: a wire form is validated while it is converted, once.

#![forbid(unsafe_code)]

pub mod convert;
pub mod error;

#[allow(clippy::all, missing_debug_implementations)]
#[rustfmt::skip]
mod generated {
    pub mod v1 {
        tonic::include_proto!("baton.v1");
    }
    pub mod internal_v1 {
        tonic::include_proto!("baton.internal.v1");
    }
}

/// Public API, `baton.v1`.
pub use generated::v1;

/// What routers and nodes say to each other, `baton.internal.v1`.
pub use generated::internal_v1 as internal;

/// Descriptors of all files, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
