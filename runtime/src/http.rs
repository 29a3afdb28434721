//! HTTP/1.1 on a bound port, with bounds on what a client may hold: connections in all, and the
//! time that it may take over a request's header.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// A client that takes longer over a header, or is idle for longer, is disconnected.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// More connections wait in the listener's backlog.
pub const CONNECTIONS_MAX: usize = 8_192;

/// After an error of `accept`, which are mostly those of too many open files.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// How long open answers may take to end once the server stops.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// Serves `app` until `stop` is ready; answers that are under way then have half a second.
pub async fn serve(listener: TcpListener, app: Router, stop: impl Future<Output = ()>) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    let service = TowerToHyperService::new(app);
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let graceful = GracefulShutdown::new();
    tokio::pin!(stop);
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await;
            (place, accept(&listener).await)
        };
        let (place, stream) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        let connection = server.serve_connection(TokioIo::new(stream), service.clone());
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                // Clients that go away, are too slow, or speak no HTTP.
                tracing::debug!(%error, "an HTTP connection ended");
            }
            drop(place);
        });
    }
    if tokio::time::timeout(LAST_ANSWERS, graceful.shutdown()).await.is_err() {
        tracing::debug!("some answers had not ended");
    }
}

/// A token is a small message that must not wait 40 ms for the acknowledgement of the one before:
/// the connection has `TCP_NODELAY`.
async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "TCP_NODELAY cannot be set");
                }
                return stream;
            }
            Err(error) => {
                tracing::warn!(%error, "no connection could be accepted");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_util::sync::CancellationToken;

    use super::*;

    async fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.unwrap()
    }

    #[tokio::test]
    async fn accepted_connections_do_not_delay() {
        let listener = listener().await;
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        assert!(accept(&listener).await.nodelay().unwrap());
    }

    #[tokio::test]
    async fn an_answer_under_way_ends_before_the_server_does() {
        let listener = listener().await;
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let asked = stop.clone();
        let slow = get(|| async move {
            asked.cancel();
            tokio::time::sleep(Duration::from_millis(50)).await;
            "whole"
        });
        let app = Router::new().route("/", slow);
        let server = tokio::spawn(serve(listener, app, async move { stop.cancelled().await }));
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("whole"), "{answer}");
        server.await.unwrap();
        assert!(TcpStream::connect(address).await.is_err(), "the port is closed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_that_does_not_end_is_given_up() {
        let listener = listener().await;
        let address = listener.local_addr().unwrap();
        let _server = tokio::spawn(serve(listener, Router::new(), std::future::pending()));
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost:").await.unwrap();
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(2 * HEADER_TIMEOUT, client.read_to_end(&mut answer)).await;
        ended.expect("the server closes the connection").unwrap();
    }
}
