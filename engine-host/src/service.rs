//! The `Node` service, which both roles serve.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_kv_transfer::transport::ucx::Ucx;
use baton_proto::internal::node_server::{Node, NodeServer};
use baton_proto::internal::{
    DrainRequest, DrainResponse, GetModelArtifactsRequest, ModelArtifactsResponse, NodeStatus,
    WatchStatusRequest,
};
use baton_registry::{CurrentIncarnation, Role};
use baton_types::{NodeId, NumericsVersion};
use futures::Stream;
use tokio::sync::broadcast::error::RecvError;
use tonic::{Request, Response, Status};

use crate::EngineHost;
use crate::kv::SendSpeed;
use crate::status::{StatusFeed, Tick};

/// A watcher hears at least so often.
const STATUS_EVERY: Duration = Duration::from_millis(400);

/// Answers for one node. Clones are the same node.
#[derive(Clone, Debug)]
pub struct NodeService {
    pub host: EngineHost,
    pub feed: StatusFeed,
    pub id: NodeId,
    pub role: Role,
    pub incarnation: CurrentIncarnation,
    ucx: Option<Ucx>,
    pub(crate) send_speed: Arc<SendSpeed>,
    draining: Arc<AtomicBool>,
}

impl NodeService {
    pub fn new(
        host: EngineHost,
        feed: StatusFeed,
        id: NodeId,
        role: Role,
        incarnation: CurrentIncarnation,
        ucx: Option<Ucx>,
    ) -> Self {
        Self {
            host,
            feed,
            id,
            role,
            incarnation,
            ucx,
            send_speed: Arc::default(),
            draining: Arc::default(),
        }
    }

    pub fn into_server(self) -> NodeServer<Self> {
        NodeServer::new(self)
    }

    /// Stops admission.
    pub fn drain(&self) {
        if !self.draining.swap(true, Ordering::AcqRel) {
            tracing::info!(node = %self.id, "draining: no new requests");
        }
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// # Errors
    /// `Unavailable` while the node drains.
    pub fn check_admission(&self) -> Result<(), baton_types::Error> {
        if self.is_draining() {
            let message = format!("node {} is draining; send the request elsewhere", self.id);
            return Err(baton_types::Error::unavailable(message));
        }
        Ok(())
    }

    /// # Errors
    /// `FailedPrecondition` with both sides named, where the router means another model.
    pub fn check_model(
        &self,
        fingerprint: &[u8],
        numerics: &str,
    ) -> Result<(), baton_types::Error> {
        let model = self.host.model();
        if fingerprint == model.fingerprint.0 && numerics == model.numerics.0 {
            return Ok(());
        }
        let asked: String = fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        Err(baton_types::Error::new(
            baton_types::ErrorCode::FailedPrecondition,
            format!(
                "node {} serves model {} ({}), but {asked} ({numerics}) was asked for",
                self.id, model.fingerprint, model.numerics
            ),
        ))
    }

    /// As [`check_model`](Self::check_model), for a prompt that is computed for another node: with
    /// `kv_conversion` that node may hold KV in another precision.
    ///
    /// # Errors
    /// As there; `kv_conversion` is named where it would have helped.
    pub fn check_receiver(
        &self,
        fingerprint: &[u8],
        numerics: &str,
        kv_conversion: bool,
    ) -> Result<(), baton_types::Error> {
        let model = self.host.model();
        let asked = NumericsVersion(numerics.to_owned());
        let differs_in_kv_alone =
            fingerprint == model.fingerprint.0 && model.numerics.differs_in_kv_alone(&asked);
        match (differs_in_kv_alone, kv_conversion) {
            (true, true) => Ok(()),
            (true, false) => Err(baton_types::Error::new(
                baton_types::ErrorCode::FailedPrecondition,
                format!(
                    "node {} has {}, the decode node {asked}: give both one kv_dtype, or set \
                     kv_conversion = true on both and on the router",
                    self.id, model.numerics
                ),
            )),
            (false, _) => self.check_model(fingerprint, numerics),
        }
    }

    fn to_wire(&self, tick: &Tick) -> NodeStatus {
        let model = self.host.model();
        let status = &tick.load.status;
        let bytes = |hashes: &[baton_types::BlockHash]| {
            hashes.iter().map(|hash| hash.0.to_vec().into()).collect()
        };
        NodeStatus {
            node_id: self.id.to_string(),
            incarnation: self.incarnation.get().0,
            role: self.role.as_str().into(),
            fingerprint: model.fingerprint.0.to_vec().into(),
            numerics: model.numerics.0.clone(),
            draining: self.is_draining(),
            running: status.running as u32,
            waiting: status.waiting as u32,
            waiting_tokens: status.waiting_tokens as u32,
            kv_blocks_total: status.pool.capacity_blocks as u32,
            kv_blocks_used: status.pool.used_blocks as u32,
            block_tokens: model.layout.block_tokens.into(),
            prefill_tokens_per_s: tick.load.speed.prefill_tokens_per_s as f32,
            decode_step_ms: tick.load.speed.decode_step_ms as f32,
            reset: tick.reset,
            stored: bytes(&tick.stored),
            removed: bytes(&tick.removed),
            grants: status.reserved as u32,
            kv_ways: crate::kv::ways(self.ucx.as_ref()),
            kv_bytes_per_s: self.send_speed.bytes_per_s() as f32,
        }
    }
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn get_model_artifacts(
        &self,
        _request: Request<GetModelArtifactsRequest>,
    ) -> Result<Response<ModelArtifactsResponse>, Status> {
        let model = self.host.model();
        Ok(Response::new(ModelArtifactsResponse {
            fingerprint: model.fingerprint.0.to_vec().into(),
            numerics: model.numerics.0.clone(),
            artifacts_json: model.artifacts_json.clone().into(),
            spec_json: model.spec_json.clone().into(),
        }))
    }

    type WatchStatusStream = Pin<Box<dyn Stream<Item = Result<NodeStatus, Status>> + Send>>;

    async fn watch_status(
        &self,
        _request: Request<WatchStatusRequest>,
    ) -> Result<Response<Self::WatchStatusStream>, Status> {
        let service = self.clone();
        let (first, ticks) = self.feed.subscribe();
        let state = Some((service, ticks, Some(first), Instant::now()));
        let stream = futures::stream::unfold(state, |state| async {
            let (service, mut ticks, first, mut sent) = state?;
            if let Some(first) = first {
                let status = service.to_wire(&first);
                return Some((Ok(status), Some((service, ticks, None, sent))));
            }
            loop {
                match ticks.recv().await {
                    Ok(tick) => {
                        let news =
                            tick.reset || !tick.stored.is_empty() || !tick.removed.is_empty();
                        let busy = tick.load.status.running + tick.load.status.waiting > 0;
                        if news || busy || sent.elapsed() >= STATUS_EVERY {
                            sent = Instant::now();
                            let status = service.to_wire(&tick);
                            return Some((Ok(status), Some((service, ticks, None, sent))));
                        }
                    }
                    Err(RecvError::Lagged(_)) => {
                        let (whole, newer) = service.feed.subscribe();
                        let status = service.to_wire(&whole);
                        return Some((Ok(status), Some((service, newer, None, sent))));
                    }
                    Err(RecvError::Closed) => return None,
                }
            }
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn drain(
        &self,
        _request: Request<DrainRequest>,
    ) -> Result<Response<DrainResponse>, Status> {
        NodeService::drain(self);
        let status = self.feed.load().status;
        let running = (status.running + status.waiting + status.reserved) as u32;
        Ok(Response::new(DrainResponse { running }))
    }
}
