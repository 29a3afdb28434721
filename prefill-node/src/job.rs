//! One prompt: computed by the engine, and pushed to its decode node while it is computed.

use std::sync::Arc;
use std::time::Instant;

use baton_engine::convert::KvConversion;
use baton_engine::core::{EngineEvent, ExportedSpan, Prefilled, RunStats, SpanExport, Work};
use baton_engine::thread::EngineThread;
use baton_engine_host::{Events, NodeService, events};
use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::grant::Grant;
use baton_kv_transfer::message::CommitInfo;
use baton_kv_transfer::send::{self, Outgoing};
use baton_kv_transfer::sender::{Sender, SenderConfig, SenderIdentity, SenderReport};
use baton_kv_transfer::transport::{Carried, Transport};
use baton_kv_transfer::{KvSpan, TransferError};
use baton_proto::error::to_status;
use baton_proto::internal::prefill_event::Event;
use baton_proto::internal::{HandedOff, PrefillEvent, PrefillRunRequest, PromptLogprobs};
use baton_types::{Error, ErrorCode, GenerateRequest, RequestId};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tracing::Instrument;

use crate::convert;
use crate::metrics::PrefillMetrics;

/// What all jobs of one node share.
#[derive(Debug)]
pub(crate) struct Jobs {
    pub node: NodeService,
    pub clock: Clock,
    pub transport: Arc<dyn Transport>,
    /// Transfers run there.
    pub runtime: tokio::runtime::Handle,
    pub metrics: PrefillMetrics,
    pub sender_config: SenderConfig,
}

type RouterStream = mpsc::Sender<Result<PrefillEvent, Status>>;

/// A checked job that has not begun.
pub(crate) struct Job {
    jobs: Arc<Jobs>,
    request: GenerateRequest,
    grant: Grant,
    sender: Sender,
    /// Where the decode node holds KV in another precision.
    conversion: Option<KvConversion>,
    decode_address: String,
    arrived: Instant,
    cancel: CancellationToken,
    router: RouterStream,
}

impl Jobs {
    /// Checks a request and its grant before anything is computed.
    ///
    /// # Errors
    /// `Unavailable` while draining; `InvalidArgument`, `FailedPrecondition`.
    pub fn prepare(
        self: &Arc<Self>,
        wire: PrefillRunRequest,
        cancel: CancellationToken,
        router: RouterStream,
    ) -> Result<Job, Error> {
        let arrived = Instant::now();
        self.node.check_admission()?;
        let kv_conversion = self.sender_config.kv_conversion;
        self.node.check_receiver(&wire.fingerprint, &wire.numerics, kv_conversion)?;
        let request =
            wire.request.ok_or_else(|| Error::invalid("request", "request is missing"))?;
        let request = GenerateRequest::try_from(request)?;
        let grant =
            Grant::read(&wire.grant).map_err(|error| Error::invalid("grant", error.to_string()))?;
        check_grant(&grant, &request)?;
        let model = self.node.host.model();
        let identity = SenderIdentity {
            node: self.node.id.clone(),
            incarnation: self.node.incarnation.get(),
            fingerprint: model.fingerprint,
            numerics: model.numerics.clone(),
        };
        let now_ms = self.clock.now_ms();
        let deadline_ms = now_ms.saturating_add(request.deadline_ms);
        let sender =
            Sender::open(self.sender_config.clone(), identity, wire.grant, now_ms, deadline_ms)
                .map_err(|error| to_error(&error))?;
        let conversion = convert::conversion_for(&model.layout, &model.numerics, &grant)?;
        Ok(Job {
            jobs: self.clone(),
            request,
            grant,
            sender,
            conversion,
            decode_address: wire.decode_address,
            arrived,
            cancel,
            router,
        })
    }
}

fn check_grant(grant: &Grant, request: &GenerateRequest) -> Result<(), Error> {
    let mismatch = |what: &str, granted: String, asked: String| {
        Error::new(
            ErrorCode::FailedPrecondition,
            format!("the grant is for {what} {granted}, the request has {asked}"),
        )
    };
    if grant.request_id != request.id {
        return Err(mismatch("request", grant.request_id.to_string(), request.id.to_string()));
    }
    let tokens = request.prompt.len();
    if grant.tokens as usize != tokens || grant.cached_tokens >= grant.tokens {
        return Err(mismatch("prompt tokens", grant.tokens.to_string(), tokens.to_string()));
    }
    let unseen = request.unseen_prompt();
    if unseen != (grant.unseen.start as usize..grant.unseen.end as usize) {
        let granted = format!("{:?}", grant.unseen);
        return Err(mismatch("all but the tokens", granted, format!("{unseen:?}")));
    }
    if grant.choices != request.choices {
        return Err(mismatch("n", grant.choices.to_string(), request.choices.to_string()));
    }
    Ok(())
}

fn to_error(error: &TransferError) -> Error {
    Error::new(error.code(), format!("the handoff failed: {error}"))
}

struct SpanSender(mpsc::Sender<Outgoing>);

impl SpanExport for SpanSender {
    fn export(&mut self, span: ExportedSpan) {
        let span = KvSpan {
            layer: span.layer,
            token_first: span.token_first,
            token_count: span.token_count,
            payload: span.payload.into(),
        };
        // The channel has room for every span that the prompt can have, so this fails only where
        // the transfer has ended; the job then cancels the request.
        let _ended = self.0.try_send(Outgoing::Span(span));
    }
}

/// How the engine's part of a job ended.
struct Computed {
    stats: RunStats,
}

impl Job {
    pub fn request_id(&self) -> RequestId {
        self.request.id
    }

    /// Runs the job to its end; the router's stream gets every event and the error, if one came.
    pub async fn run(self) {
        let (id, host) = (self.request.id, self.jobs.node.host.clone());
        let router = self.router.clone();
        let cancel = self.cancel.clone();
        let result = tokio::select! {
            result = self.hand_over() => result,
            () = cancel.cancelled() => Err(Error::new(ErrorCode::Cancelled, "the router has gone")),
        };
        if let Err(error) = result {
            tracing::info!(request_id = %id, %error, "prefill failed");
            host.cancel(id);
            // The router may have gone.
            let _unheard = router.send(Err(to_status(&error))).await;
        }
    }

    async fn hand_over(self) -> Result<(), Error> {
        let (outbox, mut events) = events();
        let spans_max = self.jobs.node.host.model().spec.layers * (self.request.prompt.len() + 1);
        let (spans_in, spans) = mpsc::channel(spans_max + 1);
        let work = Work::Prefill {
            skip_tokens: self.grant.cached_tokens as usize,
            export: Box::new(SpanSender(spans_in.clone())),
        };
        let request = self.request.clone();
        let host = &self.jobs.node.host;
        let submit = move |thread: &mut EngineThread| {
            thread.engine.submit(request, &[], work, outbox, Instant::now())
        };
        host.ask(submit).await??;
        let outgoing = (self.sender, spans, self.conversion);
        let transfer = self.jobs.transfer(outgoing, &self.decode_address, &self.cancel);
        let compute = follow_engine(&mut events, &self.router, spans_in, self.arrived);
        // One side's failure ends the other at once.
        let (computed, (report, carried)) = tokio::try_join!(compute, transfer)?;
        let (computed, computed_us) = computed;
        let handed_off = HandedOff {
            cached_tokens: computed.stats.cached_tokens,
            bytes_sent: report.bytes,
            queued_us: computed.stats.queued_us,
            computed_us,
            committed_us: self.arrived.elapsed().as_micros() as u64,
            transport: way(&carried).to_owned(),
            fallback: carried.fallback().unwrap_or_default().to_owned(),
            converted: self.conversion.map(|kv| kv.to_string()).unwrap_or_default(),
        };
        emit(&self.router, Event::HandedOff(handed_off)).await;
        Ok(())
    }
}

impl Jobs {
    async fn transfer(
        &self,
        (sender, spans, conversion): (Sender, mpsc::Receiver<Outgoing>, Option<KvConversion>),
        address: &str,
        cancel: &CancellationToken,
    ) -> Result<(SenderReport, Arc<Carried>), Error> {
        let peer = format!("http://{address}");
        let span = tracing::info_span!("transfer", peer);
        let (transport, clock, cancel) = (self.transport.clone(), self.clock, cancel.clone());
        let metrics = self.metrics.clone();
        let transfer = async move {
            let stream = transport.connect(&peer).await?;
            let carried = stream.carried.clone();
            let Some(conversion) = conversion else {
                let report = send::drive(sender, stream, spans, clock, cancel).await?;
                return Ok((report, carried));
            };
            let (converted, ready) = mpsc::channel(convert::READY_SPANS);
            let converting = convert::run(conversion, spans, converted, metrics);
            let sending = send::drive(sender, stream, ready, clock, cancel);
            let (report, ()) = tokio::try_join!(sending, converting)?;
            Ok((report, carried))
        };
        // Dropped with this future, as everything of the job is.
        let task = AbortOnDropHandle::new(self.runtime.spawn(transfer.instrument(span)));
        match task.await {
            Ok(result) => result.map_err(|error: TransferError| to_error(&error)),
            Err(error) => Err(Error::internal(format!("the transfer ended by itself: {error}"))),
        }
    }
}

/// Which way the frames went.
fn way(carried: &Carried) -> &'static str {
    match (carried.ucx_bytes(), carried.grpc_bytes()) {
        (0, 0) => "",
        (0, _) => "grpc",
        (_, 0) => "ucx",
        (_, _) => "ucx, then grpc",
    }
}

/// Passes the engine's events on until the prompt is done, and hands the commit to the transfer.
async fn follow_engine(
    events: &mut Events,
    router: &RouterStream,
    spans: mpsc::Sender<Outgoing>,
    arrived: Instant,
) -> Result<(Computed, u64), Error> {
    let mut prefilled: Option<Prefilled> = None;
    let mut computed_us = 0;
    while let Some(event) = events.recv().await {
        match event {
            EngineEvent::Token(token) => {
                computed_us = arrived.elapsed().as_micros() as u64;
                emit(router, Event::Token((&token).into())).await;
            }
            EngineEvent::PromptLogprobs(all) => {
                let tokens = all.iter().map(Into::into).collect();
                emit(router, Event::PromptLogprobs(PromptLogprobs { tokens })).await;
            }
            EngineEvent::Prefilled(done) => prefilled = Some(done),
            EngineEvent::Finished(stats) => {
                let done = prefilled
                    .ok_or_else(|| Error::internal("a prompt ended without its first tokens"))?;
                let commit = CommitInfo {
                    first_tokens: done.first_tokens,
                    sampler_digest: done.sampler_digest,
                    prompt_logprobs: Vec::new(),
                    cached_tokens: stats.cached_tokens,
                };
                // Where the transfer has ended, its error is the one that counts.
                let _ended = spans.send(Outgoing::Finish(Box::new(commit))).await;
                return Ok((Computed { stats }, computed_us));
            }
            EngineEvent::Failed(error) => return Err(error),
            EngineEvent::ChoiceFinished { .. } => {}
        }
    }
    Err(Error::unavailable("the node's engine has stopped"))
}

async fn emit(router: &RouterStream, event: Event) {
    // Where the router has gone, the job's cancellation follows.
    let _unheard = router.send(Ok(PrefillEvent { event: Some(event) })).await;
}
