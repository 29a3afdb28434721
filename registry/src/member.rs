//! One member, and all of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_types::{Incarnation, NodeId};
use serde::{Deserialize, Serialize};

/// What a member does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Router,
    Prefill,
    Decode,
}

impl Role {
    pub(crate) const ALL: [Role; 3] = [Role::Router, Role::Prefill, Role::Decode];

    pub fn as_str(self) -> &'static str {
        match self {
            Role::Router => "router",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// One process of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub id: NodeId,
    pub role: Role,
    pub incarnation: Incarnation,
    /// `host:port` of its gRPC server, as others reach it.
    pub address: String,
    /// Served model; empty for routers.
    #[serde(default)]
    pub model: String,
    /// Hex of the model fingerprint; empty for routers.
    #[serde(default)]
    pub fingerprint: String,
    #[serde(default)]
    pub numerics: String,
}

/// All members, and whether that is fresh.
#[derive(Clone, Debug, Default)]
pub struct View {
    pub members: Arc<BTreeMap<NodeId, Member>>,
    /// The registry cannot be reached, and this is how it was.
    pub stale: bool,
}
