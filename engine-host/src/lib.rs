//! What a prefill node and a decode node have in common: an engine inside an async process.
//!
//! It loads the model, owns the async handle to the engine's thread, publishes status and block
//! events, serves the `Node` service and the engine's metrics, and joins the cluster. It knows
//! neither role.

#![forbid(unsafe_code)]

mod config;
mod events;
mod flags;
mod host;
mod kv;
mod load_log;
mod membership;
mod metrics;
mod server;
mod service;
mod status;

pub use config::{IsaChoice, NodeConfig};
pub use events::{Events, events};
pub use flags::NodeFlags;
pub use host::{EngineHost, HostError, ModelInfo};
pub use kv::{
    Destination, Grants, KvLane, KvServer, KvTransport, Outbound, PrefixHolder, Sent, Taken,
    place_frame, to_kv_span,
};
pub use load_log::LoadLog;
pub use membership::{Membership, join};
pub use metrics::EngineMetrics;
pub use server::{NodeServer, ServerError};
pub use service::NodeService;
pub use status::{NodeLoad, StatusFeed};
