//! Who is in the cluster: in etcd, or in memory for one machine and for static lists.
//!
//! It owns membership and its freshness. Load does not go through it, and losing it stops nothing
//! that runs: the last known view serves on, marked stale.

#![forbid(unsafe_code)]

mod etcd;
mod member;
mod memory;

pub use etcd::{EtcdConfig, EtcdRegistry};
pub use member::{Member, Role, View};
pub use memory::MemoryRegistry;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_types::Incarnation;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The registry cannot do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("etcd at {endpoints}: {source}; check that it runs and that the addresses are right")]
    Etcd {
        endpoints: String,
        #[source]
        source: Box<etcd_client::Error>,
    },
    #[error("id: {id} is a node of this cluster already, at {address}; give this one another id")]
    Taken { id: String, address: String },
    #[error("member {0} cannot be written as JSON: {1}")]
    Encode(String, serde_json::Error),
}

/// Membership: a node registers itself, and everybody watches.
#[async_trait::async_trait]
pub trait Registry: Send + Sync {
    /// Registers a member until the registration is dropped or left. Where the lease or the entry
    /// is lost while the process lives, it registers again under a new incarnation.
    ///
    /// # Errors
    /// Where the registry cannot be reached now, or another member has that name and stays.
    async fn register(&self, member: Member) -> Result<Registration, RegistryError>;

    /// The members as they are known, at once and after every change.
    fn watch(&self) -> watch::Receiver<View>;
}

/// Keeps a member in the registry.
#[derive(Debug)]
pub struct Registration {
    incarnation: CurrentIncarnation,
    leave: CancellationToken,
    tasks: TaskTracker,
}

/// The incarnation under which the member stands now; it changes when a lease was lost.
#[derive(Clone, Debug)]
pub struct CurrentIncarnation(Arc<AtomicU64>);

impl CurrentIncarnation {
    pub fn new(incarnation: Incarnation) -> Self {
        Self(Arc::new(AtomicU64::new(incarnation.0)))
    }

    pub fn get(&self) -> Incarnation {
        Incarnation(self.0.load(Ordering::Acquire))
    }

    fn set(&self, incarnation: Incarnation) {
        self.0.store(incarnation.0, Ordering::Release);
    }
}

impl Registration {
    fn new(incarnation: Incarnation) -> Self {
        Self {
            incarnation: CurrentIncarnation::new(incarnation),
            leave: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }
    }

    pub fn incarnation(&self) -> CurrentIncarnation {
        self.incarnation.clone()
    }

    /// Takes the member out, and returns when that is done or cannot be done.
    pub async fn leave(self) {
        self.leave.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.leave.cancel();
    }
}
