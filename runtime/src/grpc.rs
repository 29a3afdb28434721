//! gRPC channels and servers with the windows and keepalives that Baton needs.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint, Server};

/// Where a peer that says nothing is found out; the protocol's own heartbeats are faster.
pub const KEEPALIVE: Duration = Duration::from_secs(5);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// An address that is none.
#[derive(Debug, thiserror::Error)]
#[error("{address:?} is no address; give host:port or http://host:port")]
pub struct BadAddress {
    address: String,
}

/// A channel that connects when it is first used, and again after a loss. `address` is
/// `host:port`, with or without `http://`.
///
/// # Errors
/// Where the address is none.
pub fn channel(address: &str) -> Result<Channel, BadAddress> {
    Ok(endpoint(address)?.connect_lazy())
}

/// See [`channel`].
///
/// # Errors
/// Where the address is none.
pub fn endpoint(address: &str) -> Result<Endpoint, BadAddress> {
    let bad = || BadAddress { address: address.to_string() };
    let full =
        if address.contains("://") { address.to_string() } else { format!("http://{address}") };
    let endpoint = Endpoint::from_shared(full).map_err(|_| bad())?;
    if endpoint.uri().port().is_none() {
        return Err(bad());
    }
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true))
}

/// A server with the same keepalives.
pub fn server() -> Server {
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .tcp_nodelay(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        for good in ["127.0.0.1:5", "http://localhost:80", "https://a.b:1"] {
            assert!(endpoint(good).is_ok(), "{good}");
        }
        for bad in ["", "localhost", "http://", "a b:1"] {
            assert!(endpoint(bad).is_err(), "{bad}");
        }
    }
}
