//! The wiring of a decode node.

use std::net::SocketAddr;
use std::sync::Arc;

use baton_engine::load::LoadObserver;
use baton_engine_host::{LoadLog, NodeConfig, NodeServer, ServerError};
use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::transport::grpc;
use baton_proto::internal::decode_server::DecodeServer;
use baton_registry::{Registry, Role};
use baton_runtime::serve::bind;
use baton_runtime::shutdown::Shutdown;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;

use crate::metrics::TransferMetrics;
use crate::push::serve_pushes;
use crate::service::DecodeService;
use crate::sessions::Sessions;

/// A decode node that is about to serve.
#[derive(Debug)]
pub struct DecodeNode {
    server: NodeServer,
    kv: TcpListener,
    kv_address: SocketAddr,
}

impl DecodeNode {
    /// Binds, loads the model and registers: in `registry` where one is given.
    ///
    /// # Errors
    /// See [`NodeServer::build`].
    pub async fn build(
        config: NodeConfig,
        registry: Option<Arc<dyn Registry>>,
    ) -> Result<Self, ServerError> {
        Self::build_observed(config, registry, Arc::new(LoadLog::default())).await
    }

    /// As [`build`](Self::build); `observer` hears how the load gets on, instead of the log.
    ///
    /// # Errors
    /// See [`NodeServer::build`].
    pub async fn build_observed(
        config: NodeConfig,
        registry: Option<Arc<dyn Registry>>,
        observer: Arc<dyn LoadObserver + Send>,
    ) -> Result<Self, ServerError> {
        let (kv, kv_address) = bind(SocketAddr::new(config.grpc.ip(), config.kv_port)).await?;
        let server = NodeServer::build(config, Role::Decode, registry, observer).await?;
        Ok(Self { server, kv, kv_address })
    }

    /// Where KV is taken.
    pub fn kv_address(&self) -> SocketAddr {
        self.kv_address
    }

    pub fn grpc_address(&self) -> SocketAddr {
        self.server.grpc_address()
    }

    pub fn http_address(&self) -> SocketAddr {
        self.server.http_address()
    }

    /// Serves until the shutdown.
    ///
    /// # Errors
    /// Where a server fails.
    pub async fn serve(self, shutdown: Shutdown) -> Result<(), ServerError> {
        let metrics = TransferMetrics::new(&self.server.metrics)?;
        let sessions = Arc::new(Sessions::new(
            self.server.service.clone(),
            self.server.config(),
            Clock::start(),
            self.server.reachable(self.kv_address),
        ));
        let lane = &self.server.lane;
        let (push, incoming) = grpc::listener(lane.memory.clone(), lane.ucx.clone());
        let runtime = lane.runtime.handle().clone();
        let kv = self.kv.into_std().map_err(ServerError::KvLane)?;
        let (stop, pushes) = (shutdown.stop.clone(), sessions.clone());
        let serving = runtime.spawn(async move {
            tokio::spawn(serve_pushes(incoming, pushes, metrics));
            if let Err(error) = serve_kv(kv, push, stop).await {
                tracing::error!(%error, "this node takes no KV any more");
            }
        });
        let mut routes = Routes::builder();
        routes.add_service(DecodeServer::new(DecodeService::new(sessions)));
        let server = baton_runtime::grpc::server();
        self.server.serve(server, routes.routes(), shutdown).await?;
        // It stops with the rest; what it still has would only keep the process.
        serving.abort();
        Ok(())
    }
}

/// Serves on the runtime that it is called on, until told to stop.
async fn serve_kv(
    kv: std::net::TcpListener,
    services: Routes,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let kv = TcpIncoming::from(TcpListener::from_std(kv)?).with_nodelay(Some(true));
    let server = grpc::server().add_routes(services);
    let served = server.serve_with_incoming_shutdown(kv, stop.cancelled_owned()).await;
    served.map_err(std::io::Error::other)
}
