//! The nodes that the router knows: membership from the registry, load and prefix indexes from
//! the nodes themselves.

mod failures;
mod link;
mod node;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_registry::{Member, Registry, Role, View};
use baton_types::{ModelFingerprint, NodeId};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::catalog::Catalog;

pub use node::{InFlight, Kept, Node, NodeState, NodeView};

/// All nodes. Clones share them.
#[derive(Clone, Debug)]
pub struct Cluster(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    nodes: Mutex<BTreeMap<NodeId, Arc<Node>>>,
    view: watch::Receiver<View>,
    /// Counts changes of any node's state, for those that wait for one.
    changed: watch::Sender<u64>,
}

impl Cluster {
    /// Follows the registry, and every node in it, until `stop`.
    pub fn follow(
        registry: Arc<dyn Registry>,
        catalog: Catalog,
        node_silent: Duration,
        stop: CancellationToken,
    ) -> Self {
        let cluster = Self(Arc::new(Shared {
            nodes: Mutex::default(),
            view: registry.watch(),
            changed: watch::Sender::new(0),
        }));
        let follower = cluster.clone();
        tokio::spawn(async move {
            // The registry lives as long as somebody follows it.
            let registry = registry;
            let mut view = registry.watch();
            loop {
                let members = view.borrow_and_update().members.clone();
                follower.take_over(&members, &catalog, node_silent, &stop);
                tokio::select! {
                    changed = view.changed() => if changed.is_err() { return },
                    () = stop.cancelled() => return,
                }
            }
        });
        cluster
    }

    /// Nodes as they are now.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.lock().values().cloned().collect()
    }

    /// Models of decode nodes that are there; those whose node has just failed included.
    pub fn live_models(&self) -> BTreeSet<ModelFingerprint> {
        let nodes = self.nodes();
        let decode = nodes.iter().filter(|node| node.member().role == Role::Decode);
        decode.filter_map(|node| node.model()).collect()
    }

    /// Whether membership comes from the last known view.
    pub fn is_stale(&self) -> bool {
        self.0.view.borrow().stale
    }

    /// Tells of every change of a node's state.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    fn take_over(
        &self,
        members: &BTreeMap<NodeId, Member>,
        catalog: &Catalog,
        node_silent: Duration,
        stop: &CancellationToken,
    ) {
        let mut nodes = self.lock();
        nodes.retain(|id, node| {
            let stays = members.get(id).is_some_and(|member| member == node.member());
            if !stays {
                // What runs there goes on until its own stream ends, and its link listens so
                // long; nothing new goes there.
                node.set_departed();
            }
            stays
        });
        for member in members.values().filter(|member| member.role != Role::Router) {
            if nodes.contains_key(&member.id) {
                continue;
            }
            let node = match Node::new(member.clone()) {
                Ok(node) => Arc::new(node),
                Err(error) => {
                    tracing::warn!(node = %member.id, %error, "the member is left out");
                    continue;
                }
            };
            let (role, address) = (member.role.as_str(), &member.address);
            tracing::info!(node = %member.id, role, address, "a node is registered");
            let link = link::Link {
                node: node.clone(),
                catalog: catalog.clone(),
                silent: node_silent,
                changed: self.0.changed.clone(),
            };
            let stop = stop.clone();
            tokio::spawn(async move {
                tokio::select! {
                    () = link.run() => {}
                    () = stop.cancelled() => {}
                }
            });
            nodes.insert(member.id.clone(), node);
        }
        drop(nodes);
        self.0.changed.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Arc<Node>>> {
        self.0.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
