//! A node's place in the cluster.

use std::sync::Arc;

use baton_registry::{
    CurrentIncarnation, EtcdConfig, EtcdRegistry, Member, Registration, Registry, RegistryError,
    Role,
};
use baton_runtime::random;
use baton_types::{Incarnation, NodeId};

use crate::{ModelInfo, NodeConfig};

/// How a node stands in the cluster: registered, or known to its router by configuration alone.
#[derive(Debug)]
pub struct Membership {
    registration: Option<Registration>,
    incarnation: CurrentIncarnation,
}

impl Membership {
    pub fn incarnation(&self) -> CurrentIncarnation {
        self.incarnation.clone()
    }

    /// Takes the node out of the registry.
    pub async fn leave(self) {
        if let Some(registration) = self.registration {
            registration.leave().await;
        }
    }
}

/// Registers a node: in `registry` where one is given, else in the configured etcd, else nowhere.
///
/// # Errors
/// Where the registry cannot be reached.
pub async fn join(
    config: &NodeConfig,
    id: &NodeId,
    role: Role,
    address: String,
    model: &ModelInfo,
    registry: Option<Arc<dyn Registry>>,
) -> Result<Membership, RegistryError> {
    let incarnation = Incarnation(random::nonzero_u64());
    let registry = match registry {
        Some(registry) => registry,
        None if config.etcd.is_empty() => {
            let incarnation = CurrentIncarnation::new(incarnation);
            return Ok(Membership { registration: None, incarnation });
        }
        None => Arc::new(
            EtcdRegistry::connect(EtcdConfig {
                prefix: config.etcd_prefix.clone(),
                lease_ttl: std::time::Duration::from_millis(config.lease_ttl_ms),
                ..EtcdConfig::new(config.etcd.clone())
            })
            .await?,
        ),
    };
    let member = Member {
        id: id.clone(),
        role,
        incarnation,
        address,
        model: model.spec.name.clone(),
        fingerprint: model.fingerprint.to_string(),
        numerics: model.numerics.to_string(),
    };
    let registration = registry.register(member).await?;
    let incarnation = registration.incarnation();
    Ok(Membership { registration: Some(registration), incarnation })
}
