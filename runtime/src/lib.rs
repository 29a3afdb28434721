//! What every process of Baton needs, whatever its role: configuration from file, environment and
//! flags; logs; the ports, health and metrics; signals and drain; tuned gRPC channels.
//!
//! It knows nothing of models, KV or requests.

#![forbid(unsafe_code)]

pub mod config;
pub mod exit;
pub mod grpc;
pub mod health;
pub mod http;
pub mod logs;
pub mod own_runtime;
pub mod random;
pub mod serve;
pub mod shutdown;
