//! Follows one node's status, and fetches what its model needs at the router.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::internal::node_client::NodeClient;
use baton_proto::internal::{GetModelArtifactsRequest, NodeStatus, WatchStatusRequest};
use baton_runtime::random::jittered_ms;
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::Streaming;

use super::node::Node;
use crate::catalog::Catalog;

/// Before a broken link is tried again, jittered.
const RETRY_MS: u64 = 200;

/// One call at most.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Artifacts hold a vocabulary: some megabytes.
const ARTIFACTS_MAX_BYTES: usize = 64 << 20;

pub(super) struct Link {
    pub node: Arc<Node>,
    pub catalog: Catalog,
    pub silent: Duration,
    pub changed: watch::Sender<u64>,
}

impl Link {
    /// Returns when the node has departed and nothing of this router's runs there any more.
    pub async fn run(self) {
        let id = &self.node.member().id;
        let mut told = false;
        loop {
            match self.watch().await {
                Ok(stream) => {
                    told = false;
                    let why = self.follow(stream).await;
                    if self.node.is_departed() {
                        tracing::info!(node = %id, why, "a departed node is not followed any more");
                    } else {
                        tracing::warn!(node = %id, why, "the node is not heard any more");
                    }
                }
                Err(error) if told => {
                    tracing::debug!(node = %id, error, "the node still cannot be reached");
                }
                Err(error) => {
                    told = true;
                    tracing::warn!(node = %id, error, "the node cannot be reached; trying on");
                }
            }
            self.node.set_lost(true);
            self.tell();
            if self.node.is_departed() {
                return;
            }
            tokio::time::sleep(jittered_ms(RETRY_MS)).await;
        }
    }

    /// Learns the model, then opens the status stream.
    async fn watch(&self) -> Result<Streaming<NodeStatus>, String> {
        let mut client =
            NodeClient::new(self.node.channel()).max_decoding_message_size(ARTIFACTS_MAX_BYTES);
        let answer = timeout(CALL_TIMEOUT, client.get_model_artifacts(GetModelArtifactsRequest {}))
            .await
            .map_err(|_| "no answer in time".to_string())?
            .map_err(|status| status.message().to_string())?
            .into_inner();
        self.catalog.learn(&answer).await.map_err(|error| error.to_string())?;
        let stream = timeout(CALL_TIMEOUT, client.watch_status(WatchStatusRequest {}))
            .await
            .map_err(|_| "no answer in time".to_string())?
            .map_err(|status| status.message().to_string())?;
        Ok(stream.into_inner())
    }

    /// Returns why it ended.
    async fn follow(&self, mut stream: Streaming<NodeStatus>) -> &'static str {
        loop {
            match timeout(self.silent, stream.message()).await {
                Ok(Ok(Some(status))) => {
                    self.node.hear(status);
                    self.tell();
                    if self.node.is_departed() && !self.node.is_in_use() {
                        return "it is not registered any more";
                    }
                }
                Ok(Ok(None)) => return "it has closed the stream",
                Ok(Err(_)) => return "the connection broke",
                Err(_) => return "it is silent",
            }
        }
    }

    fn tell(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}
