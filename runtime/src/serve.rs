//! The life of a process that serves: it binds two ports, is ready, drains, and stops.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::http;
use crate::shutdown::Shutdown;

/// Streams that nobody ends, such as those of status, are not waited for at the end.
const LAST_STREAMS: Duration = Duration::from_millis(500);

/// The process cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{address} cannot be listened on: {source}; free the port or choose another")]
    Bind {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("the server failed: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// A port for gRPC, and one for HTTP with health and metrics; bound, but nobody is answered yet.
#[derive(Debug)]
pub struct Ports {
    grpc: TcpListener,
    http: TcpListener,
    grpc_address: SocketAddr,
    http_address: SocketAddr,
}

/// What is served on them.
#[derive(Debug)]
pub struct Offer {
    /// With the limits and windows that the services want.
    pub server: Server,
    pub services: Routes,
    /// For reflection: an encoded `FileDescriptorSet`.
    pub descriptors: &'static [u8],
    pub app: Router,
}

/// A process that answers.
#[derive(Debug)]
pub struct Serving {
    health: HealthReporter,
    grpc: JoinHandle<Result<(), tonic::transport::Error>>,
    http: JoinHandle<()>,
    shutdown: Shutdown,
}

impl Ports {
    /// # Errors
    /// Where a port is taken or may not be bound.
    pub async fn bind(grpc: SocketAddr, http: SocketAddr) -> Result<Self, ServeError> {
        let ((grpc, grpc_address), (http, http_address)) = (bind(grpc).await?, bind(http).await?);
        Ok(Self { grpc, http, grpc_address, http_address })
    }

    /// Where gRPC listens.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc_address
    }

    /// Where HTTP listens.
    pub fn http_address(&self) -> SocketAddr {
        self.http_address
    }

    /// Begins to answer, with gRPC health and reflection beside what is offered.
    ///
    /// # Errors
    /// Where the descriptors are none.
    pub async fn serve(self, offer: Offer, shutdown: Shutdown) -> Result<Serving, ServeError> {
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(offer.descriptors)
            .build_v1()?;
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_service_status("", ServingStatus::Serving).await;
        let services = offer.services.add_service(health_service).add_service(reflection);
        let stopped = || {
            let stop = shutdown.stop.clone();
            async move { stop.cancelled().await }
        };
        let http = tokio::spawn(http::serve(self.http, offer.app, stopped()));
        // See `http::accept`: small messages must not wait.
        let incoming = TcpIncoming::from(self.grpc).with_nodelay(Some(true));
        let mut server = offer.server;
        let server = server.add_routes(services);
        let grpc = tokio::spawn(server.serve_with_incoming_shutdown(incoming, stopped()));
        Ok(Serving { health, grpc, http, shutdown })
    }
}

impl Serving {
    /// From now on gRPC health says that new requests should go elsewhere.
    pub async fn leave(&self) {
        self.health.set_service_status("", ServingStatus::NotServing).await;
    }

    /// Waits until `run_dry` is ready, or for `grace`, or until the process is told to stop;
    /// then stops.
    ///
    /// # Errors
    /// Where the gRPC server failed.
    pub async fn end(
        self,
        run_dry: impl Future<Output = ()>,
        grace: Duration,
    ) -> Result<(), ServeError> {
        tokio::select! {
            () = run_dry => tracing::info!("drained"),
            () = tokio::time::sleep(grace) => tracing::warn!("the grace period is over"),
            () = self.shutdown.stop.cancelled() => {}
        }
        self.shutdown.stop.cancel();
        let served = tokio::time::timeout(LAST_STREAMS, self.grpc).await;
        if let Err(error) = self.http.await {
            tracing::error!(%error, "the HTTP server ended by itself");
        }
        match served {
            Ok(Ok(result)) => Ok(result?),
            _ => Ok(()),
        }
    }
}

/// Listens, and says where: port 0 is any that is free.
///
/// # Errors
/// Where the port is taken or may not be bound.
pub async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServeError> {
    let failed = |source| ServeError::Bind { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_taken_port_is_named() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let first = Ports::bind(any, any).await.unwrap();
        let taken = first.http_address();
        let error = Ports::bind(any, taken).await.unwrap_err().to_string();
        assert!(error.contains(&taken.to_string()), "{error}");
    }
}
