//! The wiring of a router.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1::baton_server::BatonServer;
use baton_registry::{
    EtcdConfig, EtcdRegistry, Member, MemoryRegistry, Registration, Registry, RegistryError, Role,
};
use baton_runtime::health::{self, Health};
use baton_runtime::random;
use baton_runtime::serve::{Offer, Ports, ServeError};
use baton_runtime::shutdown::Shutdown;
use baton_types::{Incarnation, NodeId};
use tokio::sync::Semaphore;
use tonic::service::Routes;

use crate::admit::Admission;
use crate::catalog::Catalog;
use crate::cluster::{Cluster, NodeState};
use crate::config::RouterConfig;
use crate::dispatch::Dispatcher;
use crate::gateway::{ENCODERS, Gateway};
use crate::grpc::GrpcApi;
use crate::metrics::RouterMetrics;
use crate::openai;

/// The router cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    #[error("the configuration is wrong:\n  {}", .0.join("\n  "))]
    Config(Vec<String>),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// Gauges are brought up to date so often.
const GAUGES_EVERY: Duration = Duration::from_millis(250);

/// A router that has its ports and follows the cluster.
#[derive(Debug)]
pub struct RouterApp {
    gateway: Gateway,
    metrics: prometheus::Registry,
    health: Health,
    ports: Ports,
    registration: Option<Registration>,
}

impl RouterApp {
    /// Binds and begins to follow: `registry` where one is given, else etcd and static nodes.
    ///
    /// # Errors
    /// Each of these steps'.
    pub async fn build(
        config: RouterConfig,
        registry: Option<Arc<dyn Registry>>,
        shutdown: &Shutdown,
    ) -> Result<Self, RouterError> {
        config.check().map_err(RouterError::Config)?;
        let ports = Ports::bind(config.grpc, config.http).await?;
        let registry = match registry {
            Some(registry) => registry,
            None => make_registry(&config).await?,
        };
        let address = ports.grpc_address().to_string();
        let registration = registry.register(own_member(&config, address)).await?;
        let config = Arc::new(config);
        let metrics = prometheus::Registry::new();
        let router_metrics = RouterMetrics::new(&metrics)?;
        let catalog = Catalog::default();
        let silent = Duration::from_millis(config.node_silent_ms);
        let stop = shutdown.stop.clone();
        let cluster = Cluster::follow(registry, catalog.clone(), silent, stop);
        let dispatcher = Dispatcher {
            cluster: cluster.clone(),
            config: config.clone(),
            metrics: router_metrics.clone(),
            budget: Arc::default(),
            stop: shutdown.stop.clone(),
        };
        let admission = Admission::new(&config);
        let gateway = Gateway {
            catalog,
            cluster,
            admission,
            dispatcher,
            config,
            encoders: Arc::new(Semaphore::new(ENCODERS)),
            metrics: router_metrics,
        };
        let (health, registration) = (Health::default(), Some(registration));
        Ok(Self { gateway, metrics, health, ports, registration })
    }

    pub fn grpc_address(&self) -> SocketAddr {
        self.ports.grpc_address()
    }

    pub fn http_address(&self) -> SocketAddr {
        self.ports.http_address()
    }

    /// What `/readyz` answers: a decode node can be asked.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Serves until told to drain, lets running requests end within the grace, and stops.
    ///
    /// # Errors
    /// Where a server fails.
    pub async fn serve(self, shutdown: Shutdown) -> Result<(), RouterError> {
        let api = BatonServer::new(GrpcApi::new(self.gateway.clone()))
            .max_decoding_message_size(self.gateway.config.max_request_bytes);
        let app = openai::routes(self.gateway.clone())
            .merge(health::routes(self.health.clone(), self.metrics.clone()));
        let offer = Offer {
            server: baton_runtime::grpc::server(),
            services: Routes::new(api),
            descriptors: baton_proto::DESCRIPTORS,
            app,
        };
        let serving = self.ports.serve(offer, shutdown.clone()).await?;
        self.health.set_started();
        tokio::spawn(watch_readiness(self.gateway.clone(), self.health.clone(), shutdown.clone()));
        shutdown.drain.cancelled().await;
        self.health.set_ready(false);
        serving.leave().await;
        if let Some(registration) = self.registration {
            registration.leave().await;
        }
        let grace = Duration::from_millis(self.gateway.config.drain_grace_ms);
        Ok(serving.end(run_dry(&self.gateway.admission), grace).await?)
    }
}

/// Ready while a decode node can be asked; and the gauges.
async fn watch_readiness(gateway: Gateway, health: Health, shutdown: Shutdown) {
    let mut every = tokio::time::interval(GAUGES_EVERY);
    loop {
        tokio::select! {
            _ = every.tick() => {}
            () = shutdown.drain.cancelled() => return,
        }
        let nodes = gateway.cluster.nodes();
        let ready = nodes.iter().any(|node| {
            node.member().role == Role::Decode
                && matches!(node.state(), NodeState::Ready | NodeState::Ejected)
        });
        health.set_ready(ready);
        gateway.metrics.running.set(gateway.admission.running() as i64);
        gateway.metrics.waiting.set(gateway.admission.waiting() as i64);
        gateway.metrics.membership_stale.set(f64::from(u8::from(gateway.cluster.is_stale())));
    }
}

async fn run_dry(admission: &Admission) {
    while admission.running() + admission.waiting() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn make_registry(config: &RouterConfig) -> Result<Arc<dyn Registry>, RouterError> {
    if config.etcd.is_empty() && config.nodes.is_empty() {
        let wrong = "etcd: without it, or `nodes` in the configuration file, there are no nodes; \
                     give --etcd URL";
        return Err(RouterError::Config(vec![wrong.into()]));
    }
    if config.etcd.is_empty() {
        return Ok(Arc::new(MemoryRegistry::new(config.nodes.iter().map(static_member))));
    }
    if !config.nodes.is_empty() {
        let wrong = "nodes: static nodes and etcd exclude one another; give one of them";
        return Err(RouterError::Config(vec![wrong.into()]));
    }
    let etcd = EtcdConfig {
        prefix: config.etcd_prefix.clone(),
        lease_ttl: Duration::from_millis(config.lease_ttl_ms),
        ..EtcdConfig::new(config.etcd.clone())
    };
    Ok(Arc::new(EtcdRegistry::connect(etcd).await?))
}

/// A node of the configuration: what it serves is asked of it, and its incarnation with it.
fn static_member(node: &crate::config::StaticNode) -> Member {
    Member {
        id: NodeId::new(format!("{}-{}", node.role.as_str(), node.address)),
        role: node.role,
        incarnation: Incarnation(0),
        address: node.address.clone(),
        model: String::new(),
        fingerprint: String::new(),
        numerics: String::new(),
    }
}

fn own_member(config: &RouterConfig, address: String) -> Member {
    let incarnation = Incarnation(random::nonzero_u64());
    let id = match config.id.as_str() {
        // Routers of several machines may all have this address.
        "" if config.grpc.ip().is_unspecified() => format!("router-{address}-{:x}", incarnation.0),
        "" => format!("router-{address}"),
        id => id.to_owned(),
    };
    Member {
        id: NodeId::new(id),
        role: Role::Router,
        incarnation,
        address,
        model: String::new(),
        fingerprint: String::new(),
        numerics: String::new(),
    }
}
