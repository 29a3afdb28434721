//! Finds a decode node that takes the request, and opens the streams.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proto::error::from_status;
use baton_proto::internal::decode_client::DecodeClient;
use baton_proto::internal::prefill_client::PrefillClient;
use baton_proto::internal::{
    CancelRequest, DecodeEvent, DecodeRunRequest, Delivered, PrefillEvent, PrefillRunRequest,
    PrefixSource, Request, ReserveRequest, ReserveResponse,
};
use baton_runtime::random::jittered_ms;
use baton_types::{Error, ErrorCode, GenerateRequest, RequestId};
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::Channel;

use super::Dispatch;
use crate::cluster::{InFlight, Node, NodeView};
use crate::plan::{Plan, plan, prefix_pull};

/// One control call at most. A node answers between two steps of its engine; one that is gone is
/// found sooner, by its silence.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// Before nodes that had no room are asked again, jittered; doubled each time, up to the most, so
/// that many who wait do not keep the nodes busy with saying no.
const FULL_RETRY_MS: u64 = 50;
const FULL_RETRY_MOST_MS: u64 = 800;

/// A request that was refused for want of room so long has the next node that refuses it kept:
/// else those that need less would take each block that comes free.
const KEEP_AFTER: Duration = Duration::from_secs(2);

/// Between a change in the cluster and the next look at it, jittered.
const CHANGE_SETTLES_MS: u64 = 20;

/// A request that has its blocks and its streams.
pub(super) struct Placement {
    pub plan: Plan,
    /// As the node got it.
    pub request: GenerateRequest,
    pub attempt: u32,
    pub decode: Streaming<DecodeEvent>,
    pub prefill: Option<PrefillStream>,
    pub _decoding: InFlight,
}

/// A prompt that is being computed.
pub(super) struct PrefillStream {
    pub view: NodeView,
    pub events: Streaming<PrefillEvent>,
    pub _prefilling: InFlight,
}

/// Why nobody took a request.
struct NotPlaced {
    error: Error,
    /// The node that has no room for it now, where that was the reason.
    full_at: Option<Arc<Node>>,
}

impl From<Error> for NotPlaced {
    fn from(error: Error) -> Self {
        Self { error, full_at: None }
    }
}

/// A request that a node may have reserved and that no stream runs yet: the node would hold its
/// blocks until the grant expires. Dropped, it is cancelled there.
struct Unrun {
    node: Channel,
    id: RequestId,
    is_settled: bool,
}

impl Drop for Unrun {
    fn drop(&mut self) {
        // Outside a runtime the process ends, and its connections with it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.is_settled {
            return;
        }
        let mut client = DecodeClient::new(self.node.clone());
        let cancel = CancelRequest { request_id: self.id.0.to_vec().into() };
        runtime.spawn(async move {
            if let Err(error) = within(client.cancel(cancel)).await {
                tracing::debug!(%error, "a reservation was not cancelled; it expires");
            }
        });
    }
}

impl Dispatch {
    /// Places the request, waiting for room where there is none, within the queue's time.
    pub(super) async fn place(&mut self) -> Result<Placement, Error> {
        self.trail.placing();
        let queue = Duration::from_millis(self.router.config.queue_timeout_ms);
        let started = Instant::now();
        let give_up = (started + queue).min(self.deadline);
        let mut changes = self.router.cluster.changes();
        let mut retry_ms = FULL_RETRY_MS;
        loop {
            changes.mark_unchanged();
            let NotPlaced { error, full_at } = match self.try_place().await {
                Ok(placement) => {
                    self.kept = None;
                    return Ok(placement);
                }
                Err(not_placed) => not_placed,
            };
            let may_wait =
                matches!(error.code, ErrorCode::ResourceExhausted | ErrorCode::Unavailable)
                    && error.retry_after_ms.is_some();
            if !may_wait || Instant::now() >= give_up {
                return Err(if Instant::now() >= self.deadline {
                    self.deadline_error()
                } else {
                    error
                });
            }
            // Those that failed may be back, or others may have come.
            self.excluded.clear();
            let retry = tokio::time::sleep(jittered_ms(retry_ms));
            retry_ms = (retry_ms * 2).min(FULL_RETRY_MOST_MS);
            if error.code == ErrorCode::ResourceExhausted {
                if self.kept.is_none() && started.elapsed() >= KEEP_AFTER {
                    self.kept = full_at.and_then(|node| node.keep());
                    retry_ms = FULL_RETRY_MS;
                }
                retry.await;
                continue;
            }
            tokio::select! {
                _ = changes.changed() => tokio::time::sleep(jittered_ms(CHANGE_SETTLES_MS)).await,
                () = retry => {}
            }
        }
    }

    /// Asks one node after the other until one takes the request.
    async fn try_place(&mut self) -> Result<Placement, NotPlaced> {
        let mut full: Option<NotPlaced> = None;
        self.settle_numerics();
        loop {
            let nodes = self.views();
            let plan = match plan(&self.plan_request(), &nodes) {
                Ok(plan) => plan,
                Err(error) => return Err(full.unwrap_or(error.into())),
            };
            self.asked = self.asked.wrapping_add(1);
            let decode = plan.decode.node.clone();
            let opened = tokio::select! {
                opened = self.open(plan) => opened,
                () = decode.lost() => Err(Error::unavailable("it is not heard any more")),
            };
            let error = match opened {
                Ok(placement) => {
                    decode.worked();
                    return Ok(placement);
                }
                Err(error) => error,
            };
            self.excluded.push(decode.member().id.clone());
            match error.code {
                // A node that has no room now says more than one that never has.
                ErrorCode::ResourceExhausted => {
                    if full.as_ref().is_none_or(|full| full.error.retry_after_ms.is_none()) {
                        full = Some(NotPlaced { error, full_at: Some(decode) });
                    }
                }
                ErrorCode::Unavailable | ErrorCode::DeadlineExceeded => {
                    decode.failed();
                    self.trail.note(format!("{} did not reserve: {error}", decode.member().id));
                }
                ErrorCode::FailedPrecondition if self.router.budget.withdraw() => {
                    self.trail.note(format!("{} refused: {error}", decode.member().id));
                }
                _ => return Err(error.into()),
            }
        }
    }

    /// Reserves at the planned node and opens the streams.
    async fn open(&mut self, plan: Plan) -> Result<Placement, Error> {
        let request = self.request_for_node()?;
        let attempt = 1;
        let node = plan.decode.node.channel();
        let mut unrun = Unrun { node, id: request.id, is_settled: false };
        let reserved = self.reserve(&plan.decode, plan.prefill.as_ref(), &request, attempt).await;
        // A node that refuses holds nothing; one that does not answer may.
        unrun.is_settled =
            reserved.as_ref().is_err_and(|error| error.code != ErrorCode::Unavailable);
        let reserved = reserved?;
        let mut client = DecodeClient::new(plan.decode.node.channel());
        let run = DecodeRunRequest { request_id: request.id.0.to_vec().into(), attempt };
        let decode = within(client.run(run)).await?;
        unrun.is_settled = true;
        let decoding = plan.decode.node.begin(0);
        self.trail.placed(&plan, reserved.cached_tokens);
        let mut placement =
            Placement { plan, request, attempt, decode, prefill: None, _decoding: decoding };
        if let Some(prefill) = placement.plan.prefill.clone() {
            match self.start_prefill(&placement, prefill.clone(), &reserved).await {
                Ok(stream) => placement.prefill = Some(stream),
                Err(error) => self.replace_prefill(&mut placement, &prefill, error).await?,
            }
        }
        Ok(placement)
    }

    pub(super) async fn reserve(
        &self,
        decode: &NodeView,
        prefill: Option<&NodeView>,
        request: &GenerateRequest,
        attempt: u32,
    ) -> Result<ReserveResponse, Error> {
        let delivered = self
            .sequencer
            .delivered()
            .map(|(ids, finished)| Delivered { ids: ids.to_vec(), finished });
        let reserve = ReserveRequest {
            request: Some(Request::from(request)),
            attempt,
            fingerprint: self.model.fingerprint.0.to_vec().into(),
            numerics: self.numerics.0.clone(),
            prefill_incarnation: prefill.map_or(0, |view| view.incarnation.0),
            delivered: delivered.collect(),
        };
        let mut client = DecodeClient::new(decode.node.channel());
        within(client.reserve(reserve)).await
    }

    pub(super) async fn start_prefill(
        &mut self,
        placement: &Placement,
        view: NodeView,
        reserved: &ReserveResponse,
    ) -> Result<PrefillStream, Error> {
        let prefix = self.prefix_source(&view);
        let run = PrefillRunRequest {
            request: Some(Request::from(&placement.request)),
            grant: reserved.grant.clone(),
            decode_address: reserved.kv_address.clone(),
            fingerprint: self.model.fingerprint.0.to_vec().into(),
            numerics: self.numerics.0.clone(),
            prefix,
        };
        let mut client = PrefillClient::new(view.node.channel());
        let events = within(client.run(run)).await?;
        let prefilling = view.node.begin(self.request.prompt.len());
        Ok(PrefillStream { view, events, _prefilling: prefilling })
    }

    /// Where that prefill node should have the prompt's first tokens, if anywhere.
    fn prefix_source(&mut self, prefill: &NodeView) -> Option<PrefixSource> {
        let nodes = self.views();
        let kv_token_bytes = self.model.kv_token_bytes(&prefill.numerics);
        let pull = prefix_pull(&self.plan_request(), prefill, kv_token_bytes, &nodes);
        self.trail.pulls(pull.as_ref().map(|pull| pull.from.node.member().id.as_str()));
        let pull = pull?;
        let member = pull.from.node.member();
        Some(PrefixSource {
            node_id: member.id.to_string(),
            address: member.address.clone(),
            incarnation: pull.from.incarnation.0,
            tokens: pull.tokens as u32,
            within_ms: pull.within_ms,
        })
    }
}

async fn within<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, Error> {
    match timeout(CALL_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(from_status(&status)),
        Err(_) => Err(Error::unavailable(format!(
            "the node did not answer within {} ms",
            CALL_TIMEOUT.as_millis()
        ))),
    }
}
