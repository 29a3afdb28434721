//! The wiring of a decode node.

use std::net::SocketAddr;
use std::sync::Arc;

use baton_engine::load::LoadObserver;
use baton_engine_host::{LoadLog, NodeConfig, NodeServer, ServerError};
use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::transport::grpc;
use baton_proto::internal::decode_server::DecodeServer;
use baton_registry::{Registry, Role};
use baton_runtime::shutdown::Shutdown;
use tonic::service::Routes;

use crate::metrics::TransferMetrics;
use crate::push::serve_pushes;
use crate::service::DecodeService;
use crate::sessions::Sessions;

/// A decode node that is about to serve.
#[derive(Debug)]
pub struct DecodeNode {
    server: NodeServer,
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
        Ok(Self { server: NodeServer::build(config, Role::Decode, registry, observer).await? })
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
        ));
        let (push, incoming) = grpc::listener(None);
        tokio::spawn(serve_pushes(incoming, sessions.clone(), metrics));
        let mut routes = Routes::builder();
        routes.add_service(DecodeServer::new(DecodeService::new(sessions)));
        routes.add_service(push);
        self.server.serve(grpc::server(), routes.routes(), shutdown).await
    }
}
