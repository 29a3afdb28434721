//! Binds a node's ports, serves, and drains: the same for both roles.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::load::LoadObserver;
use baton_kv_transfer::transport::Transport;
use baton_registry::{Registry, RegistryError, Role};
use baton_runtime::health::{self, Health};
use baton_runtime::serve::{Offer, Ports, ServeError};
use baton_runtime::shutdown::Shutdown;
use baton_types::{ErrorCode, NodeId};
use tonic::service::Routes;
use tonic::transport::Server;

use crate::{
    EngineHost, EngineMetrics, HostError, KvLane, Membership, NodeConfig, NodeService, StatusFeed,
    join,
};

/// The node cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("the configuration is wrong:\n  {}", .0.join("\n  "))]
    Config(Vec<String>),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error("the engine's thread has ended by itself: a bug; the node stops and may be restarted")]
    EngineEnded,
    #[error("KV cannot be moved: {0}")]
    KvLane(#[source] std::io::Error),
    #[error(
        "kv_transport is ucx, and UCX cannot be used: {0}; install libucx0, name it with \
             ucx_library, mend ucx_tls and ucx_devices, or set kv_transport = \"auto\""
    )]
    NoUcx(String),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// A node that has its model, its ports and its place in the cluster, and does not serve yet.
pub struct NodeServer {
    pub service: NodeService,
    pub metrics: prometheus::Registry,
    pub health: Health,
    pub lane: KvLane,
    config: NodeConfig,
    ports: Ports,
    membership: Membership,
    engine: std::thread::JoinHandle<()>,
}

impl std::fmt::Debug for NodeServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeServer").field("service", &self.service).finish_non_exhaustive()
    }
}

impl NodeServer {
    /// Binds, loads and registers, in this order: a wrong port shows before minutes of loading,
    /// and nobody is sent to a node that has no model. `observer` hears how the load gets on.
    ///
    /// # Errors
    /// Each of these steps'.
    pub async fn build(
        config: NodeConfig,
        role: Role,
        registry: Option<Arc<dyn Registry>>,
        observer: Arc<dyn LoadObserver + Send>,
    ) -> Result<Self, ServerError> {
        config.check().map_err(ServerError::Config)?;
        let ports = Ports::bind(config.grpc, config.http).await?;
        let health = Health::default();
        let metrics = prometheus::Registry::new();
        let lane = KvLane::start(&config).await?;
        lane.observe(&metrics)?;
        let (host, engine) = EngineHost::load(&config, observer).await?;
        health.set_started();
        let bound = ports.grpc_address();
        let address =
            if config.advertise.is_empty() { bound.to_string() } else { config.advertise.clone() };
        let id = if config.id.is_empty() {
            NodeId::new(format!("{}-{address}", role.as_str()))
        } else {
            NodeId::new(&config.id)
        };
        let engine_metrics = EngineMetrics::new(&metrics, host.model(), id.as_str())?;
        let feed = StatusFeed::start(host.clone(), engine_metrics);
        let membership = join(&config, &id, role, address, host.model(), registry).await?;
        let service =
            NodeService::new(host, feed, id, role, membership.incarnation(), lane.ucx.clone());
        Ok(Self { service, metrics, health, lane, config, ports, membership, engine })
    }

    /// Where gRPC listens.
    pub fn grpc_address(&self) -> SocketAddr {
        self.ports.grpc_address()
    }

    /// Where health and metrics listen.
    pub fn http_address(&self) -> SocketAddr {
        self.ports.http_address()
    }

    /// Where others reach a port that this node listens on beside gRPC's.
    pub fn reachable(&self, bound: SocketAddr) -> String {
        if !bound.ip().is_unspecified() || self.config.advertise.is_empty() {
            return bound.to_string();
        }
        let advertised = &self.config.advertise;
        let host = advertised.rsplit_once(':').map_or(advertised.as_str(), |(host, _)| host);
        format!("{host}:{}", bound.port())
    }

    /// What carries this node's KV to others. Once for each node.
    ///
    /// # Errors
    /// Where a metric has been registered before.
    pub fn transport(&self) -> Result<Arc<dyn Transport>, ServerError> {
        let (id, incarnation) = (self.service.id.clone(), self.service.incarnation.get());
        Ok(self.lane.transport(id, incarnation, &self.metrics)?)
    }

    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// Serves `services` (the role's own) beside the common ones until told to drain; then leaves
    /// the registry, lets running requests end within the grace, and stops.
    ///
    /// # Errors
    /// Where a server fails.
    pub async fn serve(
        self,
        server: Server,
        services: Routes,
        shutdown: Shutdown,
    ) -> Result<(), ServerError> {
        let offer = Offer {
            server,
            services: services.add_service(self.service.clone().into_server()),
            descriptors: baton_proto::DESCRIPTORS,
            app: health::routes(self.health.clone(), self.metrics.clone()),
        };
        let serving = self.ports.serve(offer, shutdown.clone()).await?;
        self.health.set_ready(true);
        tracing::info!(node = %self.service.id, "ready");
        let engine_ended = tokio::select! {
            () = shutdown.drain.cancelled() => false,
            () = thread_end(&self.engine) => true,
        };
        self.health.set_ready(false);
        serving.leave().await;
        self.service.drain();
        self.membership.leave().await;
        let grace = Duration::from_millis(self.config.drain_grace_ms);
        let served = serving.end(run_dry(&self.service), grace).await;
        self.service.host.stop();
        let engine = self.engine;
        let _ended = tokio::task::spawn_blocking(move || engine.join()).await;
        if engine_ended {
            return Err(ServerError::EngineEnded);
        }
        Ok(served?)
    }
}

/// Returns when the engine's thread has ended, which it does unasked only by a panic.
async fn thread_end(engine: &std::thread::JoinHandle<()>) {
    while !engine.is_finished() {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn run_dry(service: &NodeService) {
    loop {
        let status = service.host.ask(|thread| thread.engine.status()).await;
        match status {
            Ok(status) if status.running + status.waiting + status.reserved == 0 => return,
            Err(error) if error.code == ErrorCode::Unavailable => return,
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
