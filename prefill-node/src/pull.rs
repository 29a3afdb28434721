//! Prefixes that other nodes hold, taken into this node's cache before a prompt is computed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_engine::core::Prefix;
use baton_engine_host::{EngineHost, Grants, NodeConfig, NodeService, Taken, place_frame};
use baton_kv_transfer::TransferError;
use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::frame::{Frame, WireLayout};
use baton_kv_transfer::grant::{Grant, GrantMinter};
use baton_kv_transfer::message::Commit;
use baton_kv_transfer::receive::{Placer, ReceiverOutcome};
use baton_kv_transfer::receiver::{Receiver, ReceiverConfig};
use baton_proto::error::from_status;
use baton_proto::internal::kv_source_client::KvSourceClient;
use baton_proto::internal::{PrefixSource, SendPrefixRequest};
use baton_runtime::random;
use baton_types::{Epoch, Error, ErrorCode, GenerateRequest, Incarnation, TransferId};
use bytes::Bytes;
use prometheus::{IntCounter, IntCounterVec, Opts, Registry};
use tokio::sync::oneshot;
use tonic::transport::Channel;

/// Nodes whose connection is kept; more are connected anew.
const CHANNELS_MAX: usize = 256;

/// All pulls of one node.
#[derive(Debug)]
pub(crate) struct Pulls {
    node: NodeService,
    clock: Clock,
    minter: Arc<GrantMinter>,
    receiver_config: ReceiverConfig,
    kv_address: String,
    /// Granted, and not opened yet.
    waiting: Mutex<HashMap<TransferId, Waiting>>,
    channels: Mutex<HashMap<String, Channel>>,
    metrics: PullMetrics,
}

#[derive(Debug)]
struct Waiting {
    receiver: Box<Receiver>,
    fence: oneshot::Receiver<TransferError>,
    failed: Failed,
}

/// Where a stream says why nothing comes.
type Failed = oneshot::Sender<TransferError>;

/// What came of a pull.
#[derive(Debug, Default)]
pub(crate) struct Pulled {
    pub tokens: u32,
    pub took: Duration,
    /// Why nothing came, though it was to be had.
    pub error: Option<Error>,
}

/// A pull on its way. Dropped, the transfer ends, and blocks that are not published go back: since
/// frames are placed by the transfer's name alone, none can come to lie in them afterwards.
struct UnderWay<'a> {
    pulls: &'a Pulls,
    id: TransferId,
    fence: Option<oneshot::Sender<TransferError>>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.pulls.waiting().remove(&self.id);
        if let Some(fence) = self.fence.take() {
            // The stream may have ended.
            let _ended = fence.send(TransferError::Cancelled);
        }
        self.pulls.node.host.drop_prefix(self.id);
    }
}

impl Pulls {
    pub fn new(
        node: NodeService,
        config: &NodeConfig,
        clock: Clock,
        kv_address: String,
        metrics: &Registry,
    ) -> Result<Self, prometheus::Error> {
        Ok(Self {
            node,
            clock,
            minter: Arc::new(GrantMinter::new(random::bytes())),
            receiver_config: ReceiverConfig {
                timing: config.timing(),
                ..ReceiverConfig::default()
            },
            kv_address,
            waiting: Mutex::default(),
            channels: Mutex::default(),
            metrics: PullMetrics::new(metrics)?,
        })
    }

    /// Takes in what `source` holds of the request's prompt and this node does not. Where that
    /// fails, or takes longer than to compute it would, the prompt is computed: the error is in
    /// the result, is counted, and the request goes on.
    pub async fn pull(&self, request: &GenerateRequest, source: PrefixSource) -> Pulled {
        let began = Instant::now();
        let within = Duration::from_millis(source.within_ms.min(request.deadline_ms));
        let node = source.node_id.clone();
        let result = match tokio::time::timeout(within, self.try_pull(request, source)).await {
            Ok(result) => result,
            Err(_) => Err(Error::new(
                ErrorCode::DeadlineExceeded,
                format!("it was not there within {} ms", within.as_millis()),
            )),
        };
        let took = began.elapsed();
        match result {
            // It had come meanwhile, with another request.
            Ok(0) => Pulled { tokens: 0, took, error: None },
            Ok(tokens) => {
                self.metrics.pulls.with_label_values(&["pulled"]).inc();
                self.metrics.tokens.inc_by(tokens.into());
                Pulled { tokens, took, error: None }
            }
            Err(error) => {
                self.metrics.pulls.with_label_values(&["failed"]).inc();
                tracing::info!(from = node, %error, "a prefix was not pulled; it is computed");
                Pulled { tokens: 0, took, error: Some(error) }
            }
        }
    }

    async fn try_pull(
        &self,
        request: &GenerateRequest,
        source: PrefixSource,
    ) -> Result<u32, Error> {
        // The last token is computed in any case.
        let reusable = request.cacheable_tokens().min(request.prompt.len().saturating_sub(1));
        let tokens = request.prompt[..reusable.min(source.tokens as usize)].to_vec();
        let prefix = Prefix { tokens, tenant_salt: request.tenant_salt.clone() };
        let (id, awaited) = (TransferId(random::bytes()), prefix.clone());
        let (fencing, fence) = oneshot::channel();
        // Before it is asked for: an answer that nobody hears is let go as well.
        let mut under_way = UnderWay { pulls: self, id, fence: None };
        let awaiting = self.node.host.ask(move |thread| thread.engine.await_prefix(id, awaited));
        let (cached, tokens) = awaiting.await??;
        if cached >= tokens {
            return Ok(0);
        }
        let grant = self.grant(request, id, cached as u32..tokens as u32, &source);
        let now_ms = self.clock.now_ms();
        let deadline_ms = now_ms.saturating_add(source.within_ms);
        let (config, minter) = (self.receiver_config, self.minter.clone());
        let (receiver, grant) = Receiver::grant(config, minter, grant, now_ms, deadline_ms);
        let (failed, failure) = oneshot::channel();
        self.waiting().insert(id, Waiting { receiver: Box::new(receiver), fence, failed });
        under_way.fence = Some(fencing);
        tokio::select! {
            asked = self.ask(prefix, grant, source) => asked?,
            Ok(error) = failure => {
                return Err(Error::new(error.code(), format!("the transfer failed: {error}")));
            }
        }
        Ok((tokens - cached) as u32)
    }

    fn grant(
        &self,
        request: &GenerateRequest,
        transfer_id: TransferId,
        missing: std::ops::Range<u32>,
        source: &PrefixSource,
    ) -> Grant {
        let model = self.node.host.model();
        Grant {
            transfer_id,
            request_id: request.id,
            epoch: Epoch(1),
            receiver: self.node.id.clone(),
            receiver_incarnation: self.node.incarnation.get(),
            sender_incarnation: Incarnation(source.incarnation),
            tokens: missing.end,
            cached_tokens: missing.start,
            unseen: 0..0,
            layout: WireLayout::from(&model.layout),
            fingerprint: model.fingerprint,
            numerics: model.numerics.clone(),
            choices: 0,
            expiry_ms: source.within_ms,
        }
    }

    /// Returns when the source has sent everything and this node has published it.
    async fn ask(&self, prefix: Prefix, grant: Bytes, source: PrefixSource) -> Result<(), Error> {
        let model = self.node.host.model();
        let mut client = KvSourceClient::new(self.channel(&source.address)?);
        let asked = client.send_prefix(SendPrefixRequest {
            tokens: prefix.tokens,
            tenant_salt: prefix.tenant_salt.into(),
            grant,
            kv_address: self.kv_address.clone(),
            fingerprint: model.fingerprint.0.to_vec().into(),
            numerics: model.numerics.0.clone(),
            deadline_ms: source.within_ms,
        });
        let sent = asked.await.map_err(|status| from_status(&status))?.into_inner();
        let (from, bytes, transport) = (source.node_id, sent.bytes_sent, sent.transport);
        tracing::debug!(from, bytes, transport, "a prefix was pulled");
        Ok(())
    }

    fn channel(&self, address: &str) -> Result<Channel, Error> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        let channel = baton_runtime::grpc::channel(address)
            .map_err(|error| Error::invalid("prefix.address", error.to_string()))?;
        if channels.len() >= CHANNELS_MAX {
            channels.clear();
        }
        channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<TransferId, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Grants for Pulls {
    type Placer = PrefixPlacer;
    type Ticket = Failed;

    fn take(&self, transfer: TransferId) -> Result<Taken<PrefixPlacer, Failed>, TransferError> {
        let waiting = self.waiting().remove(&transfer).ok_or(TransferError::Superseded)?;
        let placer = PrefixPlacer { host: self.node.host.clone(), id: transfer };
        let Waiting { receiver, fence, failed } = waiting;
        Ok(Taken { receiver, placer, fence, ticket: failed })
    }

    /// A pull has one try.
    fn give_back(&self, _receiver: Box<Receiver>, failed: Failed, outcome: ReceiverOutcome) {
        if let ReceiverOutcome::Failed(error) | ReceiverOutcome::Refused(error) = outcome {
            // The pull may have ended.
            let _unheard = failed.send(error);
        }
    }
}

/// Puts what comes into the blocks that wait for the prefix.
pub(crate) struct PrefixPlacer {
    host: EngineHost,
    id: TransferId,
}

impl Placer for PrefixPlacer {
    async fn place(&self, frame: &Frame) -> Result<(), Error> {
        let id = self.id;
        let place = place_frame(&self.host, frame, move |engine, layer, tokens, heads, payload| {
            engine.place_prefix(id, layer, tokens, heads, payload)
        });
        place.await
    }

    async fn activate(&self, _commit: Commit, is_converted: bool) -> Result<(), Error> {
        if is_converted {
            return Err(Error::internal("a prefix was converted on its way"));
        }
        let id = self.id;
        let publish = self.host.ask(move |thread| thread.engine.publish_prefix(id));
        publish.await?.map(|_tokens| ())
    }
}

#[derive(Debug)]
struct PullMetrics {
    pulls: IntCounterVec,
    tokens: IntCounter,
}

impl PullMetrics {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let pulls = IntCounterVec::new(
            Opts::new(
                "baton_prefix_pulls_total",
                "Prefixes that were to be pulled from other nodes' caches: pulled, or failed and \
                 computed instead.",
            ),
            &["result"],
        )?;
        let tokens = IntCounter::new(
            "baton_prefix_pulled_tokens_total",
            "Prompt tokens whose KV was pulled from another node's cache.",
        )?;
        registry.register(Box::new(pulls.clone()))?;
        registry.register(Box::new(tokens.clone()))?;
        Ok(Self { pulls, tokens })
    }
}
