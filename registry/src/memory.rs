//! Membership inside one process, and static lists.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_types::NodeId;
use tokio::sync::watch;

use crate::{Member, Registration, Registry, RegistryError, View};

/// Members in memory. Clones share them.
#[derive(Clone, Debug)]
pub struct MemoryRegistry {
    view: watch::Sender<View>,
}

impl MemoryRegistry {
    /// A registry that begins with these members.
    pub fn new(members: impl IntoIterator<Item = Member>) -> Self {
        let members = members.into_iter().map(|member| (member.id.clone(), member)).collect();
        Self { view: watch::Sender::new(View { members: Arc::new(members), stale: false }) }
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<NodeId, Member>)) {
        self.view.send_modify(|view| change(Arc::make_mut(&mut view.members)));
    }
}

#[async_trait::async_trait]
impl Registry for MemoryRegistry {
    async fn register(&self, member: Member) -> Result<Registration, RegistryError> {
        let registration = Registration::new(member.incarnation);
        let (id, incarnation) = (member.id.clone(), member.incarnation);
        self.change(|members| {
            members.insert(member.id.clone(), member);
        });
        let (registry, leave) = (self.clone(), registration.leave.clone());
        registration.tasks.spawn(async move {
            leave.cancelled().await;
            registry.change(|members| {
                // A younger incarnation of the same node stays.
                if members.get(&id).is_some_and(|member| member.incarnation == incarnation) {
                    members.remove(&id);
                }
            });
        });
        Ok(registration)
    }

    fn watch(&self) -> watch::Receiver<View> {
        self.view.subscribe()
    }
}
