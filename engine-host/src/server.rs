//! Binds a node's ports, serves, and drains: the same for both roles.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_registry::{Registry, RegistryError, Role};
use baton_runtime::accept;
use baton_runtime::health::{self, Health};
use baton_runtime::shutdown::Shutdown;
use baton_types::{ErrorCode, NodeId};
use tokio::net::TcpListener;
use tonic::service::Routes;

use crate::{
    EngineHost, EngineMetrics, HostError, Membership, NodeConfig, NodeService, StatusFeed, join,
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
    #[error("{address} cannot be listened on: {source}; free the port or choose another")]
    Bind {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("the engine's thread has ended by itself: a bug; the node stops and may be restarted")]
    EngineEnded,
    #[error("the server failed: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// A node that has its model, its ports and its place in the cluster, and does not serve yet.
pub struct NodeServer {
    pub service: NodeService,
    pub metrics: prometheus::Registry,
    pub health: Health,
    config: NodeConfig,
    grpc: TcpListener,
    http: TcpListener,
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
    /// and nobody is sent to a node that has no model.
    ///
    /// # Errors
    /// Each of these steps'.
    pub async fn build(
        config: NodeConfig,
        role: Role,
        registry: Option<Arc<dyn Registry>>,
    ) -> Result<Self, ServerError> {
        config.check().map_err(ServerError::Config)?;
        let grpc = bind(config.grpc).await?;
        let http = bind(config.http).await?;
        let health = Health::default();
        let metrics = prometheus::Registry::new();
        let (host, engine) = EngineHost::load(&config).await?;
        health.set_started();
        let bound = grpc.local_addr().unwrap_or(config.grpc);
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
        let service = NodeService::new(host, feed, id, role, membership.incarnation());
        Ok(Self { service, metrics, health, config, grpc, http, membership, engine })
    }

    /// Where gRPC listens.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc.local_addr().unwrap_or(self.config.grpc)
    }

    /// Where health and metrics listen.
    pub fn http_address(&self) -> SocketAddr {
        self.http.local_addr().unwrap_or(self.config.http)
    }

    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// Serves `routes` (the role's own services) beside the common ones until told to drain;
    /// then leaves the registry, lets running requests end within the grace, and stops.
    ///
    /// # Errors
    /// Where a server fails.
    pub async fn serve(self, routes: Routes, shutdown: Shutdown) -> Result<(), ServerError> {
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(baton_proto::DESCRIPTORS)
            .build_v1()?;
        let (reporter, health_service) = tonic_health::server::health_reporter();
        reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
        let routes = routes
            .add_service(self.service.clone().into_server())
            .add_service(health_service)
            .add_service(reflection);
        let app = health::routes(self.health.clone(), self.metrics.clone());
        let stop = shutdown.stop.clone();
        let http = axum::serve(accept::http(self.http), app).with_graceful_shutdown({
            let stop = stop.clone();
            async move { stop.cancelled().await }
        });
        let http = tokio::spawn(async move { http.await });
        let grpc = tokio::spawn({
            let stop = stop.clone();
            let incoming = accept::grpc(self.grpc);
            async move {
                baton_runtime::grpc::server()
                    .initial_stream_window_size(16 << 20)
                    .initial_connection_window_size(64 << 20)
                    .max_frame_size(256 << 10)
                    .add_routes(routes)
                    .serve_with_incoming_shutdown(incoming, async move { stop.cancelled().await })
                    .await
            }
        });
        self.health.set_ready(true);
        tracing::info!(node = %self.service.id, "ready");
        let engine_ended = tokio::select! {
            () = shutdown.drain.cancelled() => false,
            () = thread_end(&self.engine) => true,
        };
        self.health.set_ready(false);
        reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
        self.service.drain();
        self.membership.leave().await;
        let grace = Duration::from_millis(self.config.drain_grace_ms);
        tokio::select! {
            () = run_dry(&self.service) => tracing::info!(node = %self.service.id, "drained"),
            () = tokio::time::sleep(grace) => tracing::warn!("the grace period is over"),
            () = shutdown.stop.cancelled() => {}
        }
        shutdown.stop.cancel();
        // Watchers of status hold their streams open for ever; they are not waited for.
        let served = tokio::time::timeout(Duration::from_millis(500), grpc).await;
        http.abort();
        self.service.host.stop();
        let engine = self.engine;
        let _ended = tokio::task::spawn_blocking(move || engine.join()).await;
        if engine_ended {
            return Err(ServerError::EngineEnded);
        }
        match served {
            Ok(Ok(result)) => Ok(result?),
            _ => Ok(()),
        }
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

async fn bind(address: SocketAddr) -> Result<TcpListener, ServerError> {
    TcpListener::bind(address).await.map_err(|source| ServerError::Bind { address, source })
}
