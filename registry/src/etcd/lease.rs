//! Keeps one member's lease, and takes a new one where it is lost.

use std::sync::Arc;
use std::time::Duration;

use baton_types::Incarnation;
use etcd_client::{Client, PutOptions};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{CALL_TIMEOUT, EtcdConfig, pause};
use crate::{CurrentIncarnation, Member, RegistryError};

pub(super) struct LeaseKeeper {
    config: Arc<EtcdConfig>,
    member: Member,
    incarnation: CurrentIncarnation,
}

/// A lease that stands, and the connection it was made on.
pub(super) struct HeldLease {
    client: Client,
    id: i64,
}

/// Why the keeping of a lease ended.
enum Lost {
    /// etcd says that it is gone.
    Expired,
    /// etcd cannot be asked.
    Unreachable(etcd_client::Error),
}

impl LeaseKeeper {
    pub fn new(config: Arc<EtcdConfig>, member: Member, incarnation: CurrentIncarnation) -> Self {
        Self { config, member, incarnation }
    }

    /// Takes a lease and writes the member under it.
    pub async fn register(&self) -> Result<HeldLease, RegistryError> {
        let member = Member { incarnation: self.incarnation.get(), ..self.member.clone() };
        let value = serde_json::to_vec(&member)
            .map_err(|error| RegistryError::Encode(member.id.to_string(), error))?;
        let put = async {
            let mut client = self.config.connect().await?;
            let ttl = self.config.lease_ttl.as_secs().max(1) as i64;
            let id = client.lease_grant(ttl, None).await?.id();
            let options = PutOptions::new().with_lease(id);
            client.put(self.config.member_key(&member), value, Some(options)).await?;
            Ok(HeldLease { client, id })
        };
        put.await.map_err(|source| self.config.error(source))
    }

    /// Renews until told to leave; a lost lease is replaced under a new incarnation.
    pub async fn run(self, mut held: HeldLease, leave: CancellationToken) {
        loop {
            let lost = tokio::select! {
                () = leave.cancelled() => break,
                lost = self.keep(&mut held) => lost,
            };
            match lost {
                Lost::Expired => {
                    tracing::warn!(node = %self.member.id, "the lease is lost; registering again");
                    self.incarnation.set(Incarnation(rand::random::<u64>().max(1)));
                }
                Lost::Unreachable(error) => {
                    tracing::warn!(node = %self.member.id, %error, "etcd cannot be reached");
                }
            }
            let again = async {
                loop {
                    pause().await;
                    // The lease may have outlived the loss of the connection.
                    if let Some(held) = self.resume(held.id).await {
                        return held;
                    }
                    match self.register().await {
                        Ok(held) => return held,
                        Err(error) => tracing::debug!(%error, "registering again"),
                    }
                }
            };
            held = tokio::select! {
                () = leave.cancelled() => break,
                held = again => held,
            };
        }
        let revoked = timeout(CALL_TIMEOUT, held.client.lease_revoke(held.id)).await;
        if !matches!(revoked, Ok(Ok(_))) {
            tracing::warn!(node = %self.member.id, "the lease could not be revoked; it expires");
        }
    }

    /// Renews three times in each life of the lease. Returns when that fails.
    async fn keep(&self, held: &mut HeldLease) -> Lost {
        let every = (self.config.lease_ttl / 3).max(Duration::from_millis(300));
        loop {
            let renewed = renew(&mut held.client, held.id).await;
            match renewed {
                Ok(true) => tokio::time::sleep(every).await,
                Ok(false) => return Lost::Expired,
                Err(error) => return Lost::Unreachable(error),
            }
        }
    }

    /// Goes on with a lease that still stands, on a new connection.
    async fn resume(&self, id: i64) -> Option<HeldLease> {
        let mut client = self.config.connect().await.ok()?;
        match renew(&mut client, id).await {
            Ok(true) => Some(HeldLease { client, id }),
            Ok(false) => {
                self.incarnation.set(Incarnation(rand::random::<u64>().max(1)));
                None
            }
            Err(_) => None,
        }
    }
}

/// Renews once. False where the lease is gone.
async fn renew(client: &mut Client, id: i64) -> Result<bool, etcd_client::Error> {
    // The call renews, waits for the answer, and says `LeaseKeepAliveError` for a lease that is
    // not there.
    match timeout(CALL_TIMEOUT, client.lease_keep_alive(id)).await {
        Ok(Ok(_)) => Ok(true),
        Ok(Err(etcd_client::Error::LeaseKeepAliveError(_))) => Ok(false),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(etcd_client::Error::IoError(std::io::ErrorKind::TimedOut.into())),
    }
}
