//! Accepted connections, with `TCP_NODELAY`: a token or a grant is a small message that must not
//! wait 40 ms for the acknowledgement of the one before. The servers of tonic and axum do not set
//! it on sockets that others have bound.

use axum::serve::{Listener, ListenerExt};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::server::TcpIncoming;

/// For `serve_with_incoming` of a gRPC server.
pub fn grpc(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

/// For `axum::serve`.
pub fn http(listener: TcpListener) -> impl Listener<Io = TcpStream, Addr = std::net::SocketAddr> {
    listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY cannot be set");
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;

    #[tokio::test]
    async fn accepted_connections_do_not_delay() {
        let bind = || TcpListener::bind("127.0.0.1:0");
        let (one, two) = (bind().await.unwrap(), bind().await.unwrap());
        let _first = TcpStream::connect(one.local_addr().unwrap()).await.unwrap();
        let _second = TcpStream::connect(two.local_addr().unwrap()).await.unwrap();
        let accepted = grpc(one).next().await.unwrap().unwrap();
        assert!(accepted.nodelay().unwrap());
        let (accepted, _) = http(two).accept().await;
        assert!(accepted.nodelay().unwrap());
    }
}
