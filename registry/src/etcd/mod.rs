//! Membership in etcd: one key for each member under a lease.

mod lease;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use baton_types::NodeId;
use etcd_client::{Client, ConnectOptions, Error};
use tokio::sync::watch as channel;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::{Member, Registration, Registry, RegistryError, Role, View};

/// How to reach etcd, and how long a silent member stays.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `http://host:port` of each member of the etcd cluster.
    pub endpoints: Vec<String>,
    /// Before all keys; clusters that share an etcd differ in it.
    pub prefix: String,
    /// A member that does not renew its lease so long is gone.
    pub lease_ttl: Duration,
}

impl EtcdConfig {
    pub fn new(endpoints: Vec<String>) -> Self {
        Self { endpoints, prefix: "/baton/v1".into(), lease_ttl: Duration::from_secs(5) }
    }

    fn members_prefix(&self) -> String {
        format!("{}/members/", self.prefix)
    }

    fn member_key(&self, role: Role, id: &NodeId) -> String {
        format!("{}{}/{id}", self.members_prefix(), role.as_str())
    }

    async fn connect(&self) -> Result<Client, Error> {
        let options = ConnectOptions::new()
            .with_connect_timeout(CALL_TIMEOUT)
            .with_timeout(CALL_TIMEOUT)
            .with_keep_alive(Duration::from_secs(2), Duration::from_secs(2))
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        Client::connect(&self.endpoints, Some(options)).await
    }

    fn error(&self, source: Error) -> RegistryError {
        RegistryError::Etcd { endpoints: self.endpoints.join(","), source: Box::new(source) }
    }
}

/// One call to etcd at most.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Calls etcd, for [`CALL_TIMEOUT`] at most.
async fn within<T>(call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match timeout(CALL_TIMEOUT, call).await {
        Ok(result) => result,
        Err(_) => Err(Error::IoError(std::io::ErrorKind::TimedOut.into())),
    }
}

/// Before a failed call is tried again, jittered.
const RETRY: Duration = Duration::from_millis(300);

async fn pause() {
    tokio::time::sleep(RETRY.mul_f64(0.5 + rand::random::<f64>())).await;
}

/// A registry in etcd. It watches from its making until it is dropped.
#[derive(Debug)]
pub struct EtcdRegistry {
    config: Arc<EtcdConfig>,
    view: channel::Receiver<View>,
    stop: CancellationToken,
}

impl EtcdRegistry {
    /// Connects and lists the members.
    ///
    /// # Errors
    /// Where etcd does not answer now; later it may go away and come back.
    pub async fn connect(config: EtcdConfig) -> Result<Self, RegistryError> {
        let mut client = config.connect().await.map_err(|source| config.error(source))?;
        let listing =
            watch::list(&mut client, &config).await.map_err(|source| config.error(source))?;
        let (sender, view) = channel::channel(listing.view());
        let stop = CancellationToken::new();
        let config = Arc::new(config);
        let watcher = watch::Watcher::new(config.clone(), client, sender);
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stopped.cancelled() => {}
                () = watcher.run(listing) => {}
            }
        });
        Ok(Self { config, view, stop })
    }
}

impl Drop for EtcdRegistry {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[async_trait::async_trait]
impl Registry for EtcdRegistry {
    async fn register(&self, member: Member) -> Result<Registration, RegistryError> {
        let registration = Registration::new(member.incarnation);
        let keeper =
            lease::LeaseKeeper::new(self.config.clone(), member, registration.incarnation.clone());
        let held = keeper.join().await?;
        registration.tasks.spawn(keeper.run(held, registration.leave.clone()));
        Ok(registration)
    }

    fn watch(&self) -> channel::Receiver<View> {
        self.view.clone()
    }
}
