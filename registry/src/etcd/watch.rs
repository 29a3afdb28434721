//! Follows the members: a full list, then changes from its revision on, and a full list again
//! after a compaction or a loss of the connection.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, Error, EventType, GetOptions, KeyValue, WatchOptions, WatchStream};
use tokio::sync::watch as channel;

use super::{EtcdConfig, pause, within};
use crate::{Member, View};

/// How often a quiet watch is proved to be alive.
const PROBE_EVERY: Duration = Duration::from_secs(1);

pub(super) struct Listing {
    members: BTreeMap<String, Member>,
    revision: i64,
}

impl Listing {
    pub fn view(&self) -> View {
        let members = self.members.values().map(|member| (member.id.clone(), member.clone()));
        View { members: Arc::new(members.collect()), stale: false }
    }
}

pub(super) async fn list(client: &mut Client, config: &EtcdConfig) -> Result<Listing, Error> {
    let options = GetOptions::new().with_prefix();
    let answer = within(client.get(config.members_prefix(), Some(options))).await?;
    let revision = answer.header().map_or(0, |header| header.revision());
    let members = answer.kvs().iter().filter_map(parse).collect();
    Ok(Listing { members, revision })
}

pub(super) fn parse(kv: &KeyValue) -> Option<(String, Member)> {
    let key = String::from_utf8_lossy(kv.key()).into_owned();
    match serde_json::from_slice(kv.value()) {
        Ok(member) => Some((key, member)),
        Err(error) => {
            tracing::warn!(key, %error, "a member's entry cannot be read and is left out");
            None
        }
    }
}

pub(super) struct Watcher {
    config: Arc<EtcdConfig>,
    client: Client,
    view: channel::Sender<View>,
}

impl Watcher {
    pub fn new(config: Arc<EtcdConfig>, client: Client, view: channel::Sender<View>) -> Self {
        Self { config, client, view }
    }

    /// Never returns.
    pub async fn run(mut self, mut listing: Listing) {
        loop {
            if let Err(error) = self.follow(listing).await {
                tracing::warn!(%error, "etcd cannot be followed; the last known members serve on");
                self.view.send_modify(|view| view.stale = true);
            }
            listing = self.list_again().await;
            self.view.send_replace(listing.view());
        }
    }

    async fn list_again(&mut self) -> Listing {
        loop {
            if let Ok(mut client) = self.config.connect().await
                && let Ok(listing) = list(&mut client, &self.config).await
            {
                self.client = client;
                return listing;
            }
            pause().await;
        }
    }

    /// Returns `Ok` where the list must be read again.
    async fn follow(&mut self, mut listing: Listing) -> Result<(), Error> {
        let options = WatchOptions::new().with_prefix().with_start_revision(listing.revision + 1);
        let prefix = self.config.members_prefix();
        let mut stream = within(self.client.watch(prefix, Some(options))).await?;
        loop {
            tokio::select! {
                changed = self.next_change(&mut stream, &mut listing) => {
                    if !changed? {
                        return Ok(());
                    }
                    self.view.send_replace(listing.view());
                }
                () = tokio::time::sleep(PROBE_EVERY) => self.probe().await?,
            }
        }
    }

    /// Takes one answer of the watch over. False after a compaction, or at the stream's end.
    ///
    /// Cancel safe: nothing is changed before the answer is there.
    async fn next_change(
        &self,
        stream: &mut WatchStream,
        listing: &mut Listing,
    ) -> Result<bool, Error> {
        let Some(answer) = stream.message().await? else { return Ok(false) };
        if answer.canceled() {
            tracing::info!(
                compact_revision = answer.compact_revision(),
                reason = answer.cancel_reason(),
                "the watch was cancelled; listing again"
            );
            return Ok(false);
        }
        for event in answer.events() {
            let Some(kv) = event.kv() else { continue };
            match event.event_type() {
                EventType::Put => listing.members.extend(parse(kv)),
                EventType::Delete => {
                    listing.members.remove(&*String::from_utf8_lossy(kv.key()));
                }
            }
        }
        Ok(true)
    }

    /// A read with a quorum: fails where etcd has no leader or hangs.
    async fn probe(&self) -> Result<(), Error> {
        let mut client = self.client.clone();
        let options = GetOptions::new().with_prefix().with_count_only();
        within(client.get(self.config.members_prefix(), Some(options))).await.map(|_| ())
    }
}
