//! Runs one request: reserves, has the prompt computed, reads the tokens, and goes on elsewhere
//! when a node dies. The only sequencer of the request's tokens.
//!
//! `Placing → Streaming → Done`; a lost prefill node is replaced while streaming, under the next
//! attempt; a lost decode node leads back to `Placing`, with the tokens that were accepted.

mod explain;
mod numerics;
mod placing;
mod sequencer;
mod streaming;

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{
    Error, ErrorCode, FinishReason, GenerateRequest, NodeId, NumericsVersion, RequestId,
    TokenLogprobs, TokenOutput,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::catalog::Model;
use crate::cluster::{Cluster, Kept};
use crate::config::RouterConfig;
use crate::metrics::RouterMetrics;
use crate::plan::PlanRequest;
use crate::retry::RetryBudget;
use explain::Trail;
use numerics::PromptHashes;
use sequencer::Sequencer;

pub use explain::{Explain, Phases};

/// Events that wait for a slow client; more hold the nodes' streams back.
const EVENTS_MAX: usize = 256;

/// So many decode nodes may be lost under one request; then it is given up.
const LOST_MAX: u32 = 12;

/// What becomes of a request; `Done` or `Failed` is the last, exactly once.
#[derive(Debug)]
pub enum RequestEvent {
    /// Each (choice, index) once and in order.
    Token(TokenOutput),
    /// For prompt tokens 1.. in order; once.
    PromptLogprobs(Vec<TokenLogprobs>),
    ChoiceFinished {
        choice: u16,
        reason: FinishReason,
    },
    Done(Box<Explain>),
    Failed(Error),
}

/// Dispatches requests. Clones share everything.
#[derive(Clone, Debug)]
pub struct Dispatcher {
    pub cluster: Cluster,
    pub config: Arc<RouterConfig>,
    pub metrics: RouterMetrics,
    pub budget: Arc<RetryBudget>,
    /// The router ends now.
    pub stop: CancellationToken,
}

impl Dispatcher {
    /// Starts a request that is valid. Dropping the receiver cancels it; `enough` ends it well.
    pub fn start(
        &self,
        model: Arc<Model>,
        request: GenerateRequest,
        arrived: Instant,
        enough: CancellationToken,
    ) -> mpsc::Receiver<RequestEvent> {
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let span = tracing::info_span!("route", request_id = %request.id);
        let mut dispatch = Dispatch::new(self.clone(), model, request, arrived, events.clone());
        dispatch.enough = enough;
        let stop = self.stop.clone();
        let run = async move {
            let last = tokio::select! {
                result = dispatch.run() => match result {
                    Ok(explain) => RequestEvent::Done(Box::new(explain)),
                    Err(error) => RequestEvent::Failed(error),
                },
                () = stop.cancelled() => {
                    let why = "the router stops and its grace period is over; ask another";
                    RequestEvent::Failed(Error::unavailable(why))
                }
                // The client has gone; dropping the streams cancels at the nodes.
                () = events.closed() => return,
            };
            // The client may have gone just now.
            let _unheard = events.send(last).await;
        };
        tokio::spawn(run.instrument(span));
        receiver
    }
}

/// One request on its way.
struct Dispatch {
    router: Dispatcher,
    model: Arc<Model>,
    request: GenerateRequest,
    numerics: NumericsVersion,
    hashes: PromptHashes,
    sequencer: Sequencer,
    events: mpsc::Sender<RequestEvent>,
    deadline: Instant,
    /// Nodes that failed for this request.
    excluded: Vec<NodeId>,
    /// The node whose freed blocks are kept for this request.
    kept: Option<Kept>,
    /// Reservations asked for, which each have an id of their own.
    asked: u16,
    /// Decode nodes that were lost under this request.
    lost: u32,
    /// The client needs no more tokens.
    enough: CancellationToken,
    has_prompt_logprobs: bool,
    trail: Trail,
}

/// Why a placement ended before its request.
enum Interrupted {
    /// The decode node is gone: go on elsewhere.
    NodeLost(Error),
    /// Nothing can help.
    Fatal(Error),
}

impl Dispatch {
    fn new(
        router: Dispatcher,
        model: Arc<Model>,
        request: GenerateRequest,
        arrived: Instant,
        events: mpsc::Sender<RequestEvent>,
    ) -> Self {
        Self {
            numerics: NumericsVersion(String::new()),
            hashes: PromptHashes::default(),
            sequencer: Sequencer::new(request.choices),
            deadline: arrived + Duration::from_millis(request.deadline_ms),
            trail: Trail::new(arrived, &request, &model.spec.name),
            router,
            model,
            request,
            events,
            excluded: Vec::new(),
            kept: None,
            asked: 0,
            lost: 0,
            enough: CancellationToken::new(),
            has_prompt_logprobs: false,
        }
    }

    async fn run(mut self) -> Result<Explain, Error> {
        self.router.budget.deposit();
        loop {
            let placement = self.place().await?;
            let why = match self.stream(placement).await {
                Ok(()) => return Ok(self.trail.finish(&self.sequencer)),
                Err(Interrupted::Fatal(error)) => return Err(error),
                Err(Interrupted::NodeLost(error)) => error,
            };
            tracing::warn!(error = %why, "the decode node is lost; going on elsewhere");
            self.router.metrics.recovered();
            self.trail.recovered(&why);
            self.lost += 1;
            if self.sequencer.all_finished() {
                // Everything was delivered before the node went.
                return Ok(self.trail.finish(&self.sequencer));
            }
            if self.lost >= LOST_MAX {
                return Err(Error {
                    retry_after_ms: Some(1_000),
                    ..Error::unavailable(format!(
                        "{LOST_MAX} decode nodes were lost under this request; the last: {why}"
                    ))
                });
            }
        }
    }

    /// The request as a node gets it: under an id of its own for each placement, so that a node
    /// that comes back never takes it for the older one, and with the time that is left.
    fn request_for_node(&self) -> Result<GenerateRequest, Error> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.deadline_error());
        }
        let mut id = self.request.id;
        let asked = self.asked.to_le_bytes();
        id.0[14] ^= asked[0];
        id.0[15] ^= asked[1];
        let prompt_logprobs =
            if self.has_prompt_logprobs { None } else { self.request.prompt_logprobs };
        Ok(GenerateRequest {
            id: RequestId(id.0),
            deadline_ms: left.as_millis().max(1) as u64,
            prompt_logprobs,
            ..self.request.clone()
        })
    }

    fn plan_request(&self) -> PlanRequest {
        let prompt_tokens = self.request.prompt.len();
        // With streaming attention no more is held at once than can be cached.
        let held = prompt_tokens.min(self.request.cacheable_tokens());
        PlanRequest {
            fingerprint: self.model.fingerprint,
            numerics: self.numerics.clone(),
            // A token that was drawn over KV of one precision need not be that of another.
            kv_conversion: self.router.config.kv_conversion && !self.sequencer.has_tokens(),
            prompt_tokens,
            reserve_tokens: held + 16 * usize::from(self.request.choices),
            local_prefill_max_tokens: self.router.config.local_prefill_max_tokens,
            pull_min_tokens: self.router.config.prefix_pull_min_tokens,
            excluded: self.excluded.clone(),
            kept: self.kept.as_ref().map(|kept| kept.node().clone()),
            ignores_cache: self.request.prompt_logprobs.is_some() && !self.has_prompt_logprobs,
            is_recovery: self.sequencer.has_tokens(),
            tie_break: u64::from_le_bytes(self.request.id.0[..8].try_into().expect("8 of 16")),
        }
    }

    async fn emit(&self, event: RequestEvent) {
        // Where the client has gone, this task ends at its next await.
        let _unheard = self.events.send(event).await;
    }

    fn deadline_error(&self) -> Error {
        Error::new(
            ErrorCode::DeadlineExceeded,
            format!("the request's deadline of {} ms has passed", self.request.deadline_ms),
        )
    }
}
