//! The wiring of a decode node.

use std::net::SocketAddr;
use std::sync::Arc;

use baton_engine::load::LoadObserver;
use baton_engine_host::{
    KvServer, LoadLog, NodeConfig, NodeServer, Outbound, PrefixHolder, ServerError,
};
use baton_kv_transfer::clock::Clock;
use baton_proto::internal::decode_server::DecodeServer;
use baton_registry::{Registry, Role};
use baton_runtime::shutdown::Shutdown;
use tonic::service::Routes;

use crate::service::DecodeService;
use crate::sessions::Sessions;

/// A decode node that is about to serve.
#[derive(Debug)]
pub struct DecodeNode {
    server: NodeServer,
    kv: KvServer,
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
        let kv = KvServer::bind(&config).await?;
        let server = NodeServer::build(config, Role::Decode, registry, observer).await?;
        Ok(Self { server, kv })
    }

    /// Where KV is taken.
    pub fn kv_address(&self) -> SocketAddr {
        self.kv.address()
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
        let (server, clock) = (&self.server, Clock::start());
        let sessions = Arc::new(Sessions::new(
            server.service.clone(),
            server.config(),
            clock,
            server.reachable(self.kv.address()),
        ));
        let (lane, metrics, stop) = (&server.lane, &server.metrics, shutdown.stop.clone());
        // It stops with the rest; what it still has would only keep the process.
        let _serving = self.kv.serve(lane, sessions.clone(), clock, metrics, stop)?;
        let outbound =
            Outbound::new(server.service.clone(), lane, server.transport()?, server.config());
        let mut routes = Routes::builder();
        routes.add_service(DecodeServer::new(DecodeService::new(sessions)));
        routes.add_service(PrefixHolder::new(server.service.clone(), outbound).into_server());
        let server = baton_runtime::grpc::server();
        self.server.serve(server, routes.routes(), shutdown).await
    }
}
