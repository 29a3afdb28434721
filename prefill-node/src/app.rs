//! The wiring of a prefill node.

use std::net::SocketAddr;
use std::sync::Arc;

use baton_engine::load::LoadObserver;
use baton_engine_host::{
    KvServer, LoadLog, NodeConfig, NodeServer, Outbound, PrefixHolder, ServerError,
};
use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::transport::Transport;
use baton_proto::internal::prefill_server::PrefillServer;
use baton_registry::{Registry, Role};
use baton_runtime::shutdown::Shutdown;
use tonic::service::Routes;

use crate::job::Jobs;
use crate::metrics::PrefillMetrics;
use crate::pull::Pulls;
use crate::service::PrefillService;

/// A prefill node that is about to serve.
pub struct PrefillNode {
    server: NodeServer,
    kv: KvServer,
    wrap: Option<WrapTransport>,
}

impl std::fmt::Debug for PrefillNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefillNode").field("server", &self.server).finish_non_exhaustive()
    }
}

type WrapTransport = Box<dyn FnOnce(Arc<dyn Transport>) -> Arc<dyn Transport> + Send>;

impl PrefillNode {
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
        let server = NodeServer::build(config, Role::Prefill, registry, observer).await?;
        Ok(Self { server, kv, wrap: None })
    }

    /// Sends KV over a transport that is made of the configured one.
    pub fn over(
        mut self,
        wrap: impl FnOnce(Arc<dyn Transport>) -> Arc<dyn Transport> + Send + 'static,
    ) -> Self {
        self.wrap = Some(Box::new(wrap));
        self
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
        let server = &self.server;
        let configured = server.transport()?;
        let transport = match self.wrap {
            Some(wrap) => wrap(configured),
            None => configured,
        };
        let outbound =
            Outbound::new(server.service.clone(), &server.lane, transport, server.config());
        let clock = Clock::start();
        let pulls = Arc::new(Pulls::new(
            server.service.clone(),
            server.config(),
            clock,
            server.reachable(self.kv.address()),
            &server.metrics,
        )?);
        let (lane, metrics, stop) = (&server.lane, &server.metrics, shutdown.stop.clone());
        // It stops with the rest; what it still has would only keep the process.
        let _serving = self.kv.serve(lane, pulls.clone(), clock, metrics, stop)?;
        let holder = PrefixHolder::new(server.service.clone(), outbound.clone());
        let jobs = Arc::new(Jobs {
            node: server.service.clone(),
            outbound,
            pulls,
            metrics: PrefillMetrics::new(metrics)?,
            kv_conversion: server.config().kv_conversion,
        });
        let mut routes = Routes::builder();
        routes.add_service(PrefillServer::new(PrefillService::new(jobs)));
        routes.add_service(holder.into_server());
        let server = baton_runtime::grpc::server();
        self.server.serve(server, routes.routes(), shutdown).await
    }
}
