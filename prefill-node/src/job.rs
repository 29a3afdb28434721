//! One prompt: computed by the engine, and pushed to its decode node while it is computed.

use std::sync::Arc;
use std::time::Instant;

use baton_engine::convert::KvConversion;
use baton_engine::core::{EngineEvent, ExportedSpan, Prefilled, RunStats, SpanExport, Work};
use baton_engine::thread::EngineThread;
use baton_engine_host::{Destination, Events, NodeService, Outbound, events, to_kv_span};
use baton_kv_transfer::grant::Grant;
use baton_kv_transfer::message::CommitInfo;
use baton_kv_transfer::send::Outgoing;
use baton_kv_transfer::sender::Sender;
use baton_proto::error::{DECODE_ADDRESS_FIELD, to_status};
use baton_proto::internal::prefill_event::Event;
use baton_proto::internal::{
    HandedOff, PrefillEvent, PrefillRunRequest, PrefixSource, PromptLogprobs,
};
use baton_types::{Error, ErrorCode, GenerateRequest, RequestId};
use futures::{FutureExt, future};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::convert;
use crate::metrics::PrefillMetrics;
use crate::pull::{Pulled, Pulls};

/// What all jobs of one node share.
#[derive(Debug)]
pub(crate) struct Jobs {
    pub node: NodeService,
    pub outbound: Outbound,
    pub pulls: Arc<Pulls>,
    pub metrics: PrefillMetrics,
    /// Prompts are computed for decode nodes of another precision of KV.
    pub kv_conversion: bool,
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
    to: Destination,
    prefix: Option<PrefixSource>,
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
        self.node.check_receiver(&wire.fingerprint, &wire.numerics, self.kv_conversion)?;
        let request =
            wire.request.ok_or_else(|| Error::invalid("request", "request is missing"))?;
        let request = GenerateRequest::try_from(request)?;
        let grant =
            Grant::read(&wire.grant).map_err(|error| Error::invalid("grant", error.to_string()))?;
        check_grant(&grant, &request)?;
        let to = Destination::new(DECODE_ADDRESS_FIELD, &wire.decode_address)?;
        let sender = self.outbound.open(wire.grant, request.deadline_ms, self.kv_conversion)?;
        let model = self.node.host.model();
        let conversion = convert::conversion_for(&model.layout, &model.numerics, &grant)?;
        Ok(Job {
            jobs: self.clone(),
            request,
            grant,
            sender,
            conversion,
            to,
            prefix: wire.prefix,
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

struct SpanSender(mpsc::Sender<Outgoing>);

impl SpanExport for SpanSender {
    fn export(&mut self, span: ExportedSpan) {
        let span = to_kv_span(span);
        // The channel has room for every span that the prompt can have, so this fails only where
        // the transfer has ended; the job then cancels the request.
        let _ended = self.0.try_send(Outgoing::Span(span));
    }
}

/// How the engine's part of a job ended.
struct Computed {
    stats: RunStats,
    pulled: Pulled,
    computed_us: u64,
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
        let (jobs, arrived, router) = (self.jobs.clone(), self.arrived, self.router.clone());
        let spans_max = jobs.node.host.model().spec.layers * (self.request.prompt.len() + 1);
        let (spans_in, spans) = mpsc::channel(spans_max + 1);
        let (sender, to) = (self.sender, self.to);
        let conversion = self.conversion;
        let (spans, converting) = match conversion {
            None => (spans, future::ready(Ok(())).left_future()),
            Some(conversion) => {
                let (converted, ready) = mpsc::channel(convert::READY_SPANS);
                let metrics = jobs.metrics.clone();
                (ready, convert::run(conversion, spans, converted, metrics).right_future())
            }
        };
        let transfer = jobs.outbound.send(sender, to, spans, self.cancel);
        let (request, skip_tokens) = (self.request, self.grant.cached_tokens as usize);
        let compute = async {
            let pulled = match self.prefix {
                Some(source) => jobs.pulls.pull(&request, source).await,
                None => Pulled::default(),
            };
            let (outbox, mut events) = events();
            let export = Box::new(SpanSender(spans_in.clone()));
            let work = Work::Prefill { skip_tokens, export };
            let submit = move |thread: &mut EngineThread| {
                thread.engine.submit(request, &[], work, outbox, Instant::now())
            };
            jobs.node.host.ask(submit).await??;
            let (stats, computed_us) =
                follow_engine(&mut events, &router, spans_in, arrived).await?;
            Ok(Computed { stats, pulled, computed_us })
        };
        // One side's failure ends the other at once.
        let (computed, sent, ()) = tokio::try_join!(compute, transfer, converting)?;
        let pulled_us = computed.pulled.took.as_micros() as u64;
        let handed_off = HandedOff {
            cached_tokens: computed.stats.cached_tokens,
            bytes_sent: sent.report.bytes,
            queued_us: computed.stats.queued_us,
            computed_us: computed.computed_us,
            committed_us: arrived.elapsed().as_micros() as u64,
            transport: sent.way().to_owned(),
            fallback: sent.fallback().to_owned(),
            pulled_tokens: computed.pulled.tokens,
            pulled_us,
            pull_error: computed.pulled.error.map(|error| error.to_string()).unwrap_or_default(),
            converted: conversion.map(|kv| kv.to_string()).unwrap_or_default(),
        };
        emit(&router, Event::HandedOff(handed_off)).await;
        Ok(())
    }
}

/// Passes the engine's events on until the prompt is done, and hands the commit to the transfer.
async fn follow_engine(
    events: &mut Events,
    router: &RouterStream,
    spans: mpsc::Sender<Outgoing>,
    arrived: Instant,
) -> Result<(RunStats, u64), Error> {
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
                return Ok((stats, computed_us));
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
