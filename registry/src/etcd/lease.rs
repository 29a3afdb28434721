//! Keeps one member's lease and entry, and makes them anew where they are lost.

use std::sync::Arc;
use std::time::Duration;

use baton_types::Incarnation;
use etcd_client::{Client, Compare, CompareOp, Error, KeyValue, PutOptions, Txn, TxnOp};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::watch::parse;
use super::{CALL_TIMEOUT, EtcdConfig, pause, within};
use crate::{CurrentIncarnation, Member, RegistryError, Role};

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

/// Beyond the life of its lease, how long a name stays taken by who died with it.
const EXPIRY_GRACE: Duration = Duration::from_secs(2);

/// Why the keeping of a lease ended.
enum Lost {
    /// etcd says that it is gone.
    Expired,
    /// The lease stands, the entry under it is gone or unreadable.
    Removed,
    /// The entry is another's, who stands under this name at that address.
    Taken(String),
    /// etcd cannot be asked.
    Unreachable(Error),
}

impl LeaseKeeper {
    pub fn new(config: Arc<EtcdConfig>, member: Member, incarnation: CurrentIncarnation) -> Self {
        Self { config, member, incarnation }
    }

    /// The first registration. Who stood under this name at the same address is dead, since that
    /// address is now ours; elsewhere he has the life of his lease to go.
    pub async fn join(&self) -> Result<HeldLease, RegistryError> {
        let until = Instant::now() + self.config.lease_ttl + EXPIRY_GRACE;
        let mut told = false;
        loop {
            match self.register(|other| other.address == self.member.address).await {
                Err(RegistryError::Taken { address, .. }) if Instant::now() < until => {
                    if !told {
                        told = true;
                        let node = &self.member.id;
                        tracing::info!(%node, address, "waiting for the last of this name to go");
                    }
                    pause().await;
                }
                done => return done,
            }
        }
    }

    /// Takes a lease and writes the member under it, in the place of nobody, of itself, or of
    /// whom it `may_replace`.
    async fn register(
        &self,
        may_replace: impl Fn(&Member) -> bool,
    ) -> Result<HeldLease, RegistryError> {
        let member = Member { incarnation: self.incarnation.get(), ..self.member.clone() };
        let value = serde_json::to_vec(&member)
            .map_err(|error| RegistryError::Encode(member.id.to_string(), error))?;
        let key = self.config.member_key(member.role, &member.id);
        let put = async {
            let mut client = self.config.connect().await?;
            for role in Role::ALL.into_iter().filter(|role| *role != member.role) {
                let key = self.config.member_key(role, &member.id);
                if let (_, Some(other)) = entry(&mut client, &key).await? {
                    return Ok(Err(other.address));
                }
            }
            let (revision, other) = entry(&mut client, &key).await?;
            if let Some(other) = other
                && other.incarnation != member.incarnation
                && !may_replace(&other)
            {
                return Ok(Err(other.address));
            }
            let ttl = self.config.lease_ttl.as_secs().max(1) as i64;
            let id = client.lease_grant(ttl, None).await?.id();
            let unchanged = Compare::mod_revision(key.as_str(), CompareOp::Equal, revision);
            let write = TxnOp::put(key.as_str(), value, Some(PutOptions::new().with_lease(id)));
            let txn = Txn::new().when([unchanged]).and_then([write]);
            match client.txn(txn).await?.succeeded() {
                true => Ok(Ok(HeldLease { client, id })),
                false => {
                    let (_, other) = entry(&mut client, &key).await?;
                    Ok(Err(other.map_or_else(String::new, |other| other.address)))
                }
            }
        };
        put.await
            .map_err(|source| self.config.error(source))?
            .map_err(|address| RegistryError::Taken { id: member.id.to_string(), address })
    }

    /// Renews until told to leave; a lost lease or entry is replaced under a new incarnation.
    pub async fn run(self, mut held: HeldLease, leave: CancellationToken) {
        loop {
            let lost = tokio::select! {
                () = leave.cancelled() => break,
                lost = self.keep(&mut held) => lost,
            };
            let node = &self.member.id;
            // Only a lease that etcd was not asked for may still hold the entry.
            let mut resumes = None;
            match lost {
                Lost::Expired => tracing::warn!(%node, "the lease is lost; registering again"),
                Lost::Removed => tracing::warn!(%node, "the entry is gone; registering again"),
                Lost::Taken(address) => tracing::error!(
                    %node,
                    address,
                    "another node stands under this name and gets its requests: give one of them \
                     another id; this one is left out until the other has gone"
                ),
                Lost::Unreachable(error) => {
                    tracing::warn!(%node, %error, "etcd cannot be reached");
                    resumes = Some(held.id);
                }
            }
            if resumes.is_none() {
                self.renew_incarnation();
            }
            let again = async {
                loop {
                    pause().await;
                    // The lease may have outlived the loss of the connection.
                    if let Some(id) = resumes {
                        match self.resume(id).await {
                            Ok(Some(held)) => return held,
                            Ok(None) => {
                                resumes = None;
                                self.renew_incarnation();
                            }
                            Err(error) => tracing::debug!(%error, "reaching etcd again"),
                        }
                    }
                    match self.register(|_| false).await {
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
        let key = self.config.member_key(self.member.role, &self.member.id);
        loop {
            match renew(&mut held.client, held.id).await {
                Ok(true) => {}
                Ok(false) => return Lost::Expired,
                Err(error) => return Lost::Unreachable(error),
            }
            match entry(&mut held.client, &key).await {
                Ok((_, None)) => return Lost::Removed,
                Ok((_, Some(who))) if who.incarnation != self.incarnation.get() => {
                    return Lost::Taken(who.address);
                }
                Ok(_) => tokio::time::sleep(every).await,
                Err(error) => return Lost::Unreachable(error),
            }
        }
    }

    fn renew_incarnation(&self) {
        self.incarnation.set(Incarnation(rand::random::<u64>().max(1)));
    }

    /// Goes on with a lease that still stands, on a new connection. `None`: it does not.
    async fn resume(&self, id: i64) -> Result<Option<HeldLease>, Error> {
        let mut client = self.config.connect().await?;
        Ok(renew(&mut client, id).await?.then_some(HeldLease { client, id }))
    }
}

/// Who stands at this key, where that can be read, and since which revision; 0 where nobody does.
async fn entry(client: &mut Client, key: &str) -> Result<(i64, Option<Member>), Error> {
    let answer = within(client.get(key, None)).await?;
    let entry = answer.kvs().first();
    let member = entry.and_then(parse).map(|(_, member)| member);
    Ok((entry.map_or(0, KeyValue::mod_revision), member))
}

/// Renews once. False where the lease is gone.
async fn renew(client: &mut Client, id: i64) -> Result<bool, Error> {
    // The call renews, waits for the answer, and says `LeaseKeepAliveError` for a lease that is
    // not there.
    match within(client.lease_keep_alive(id)).await {
        Ok(_) => Ok(true),
        Err(Error::LeaseKeepAliveError(_)) => Ok(false),
        Err(error) => Err(error),
    }
}
