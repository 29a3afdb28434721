//! The engine's decisions: which requests run, on which blocks, and what each step's result means
//! for them. Synchronous; one owner thread calls it (see [`crate::thread`]).
//!
//! A request is `Waiting` or `Reserved`, then its `Prompt` is computed (or received), then its
//! choices are `Answering`. Preemption sends it back to `Waiting` with the tokens it has; the same
//! path serves recovery from another node's death.

mod admit;
mod arrive;
mod prefix;
mod run;
mod step;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use baton_kv_cache::{BlockEvent, BlockPool, HashKey, PoolStats};
use baton_types::{
    Error, ErrorCode, GenerateRequest, Limits, ModelFingerprint, RequestId, TransferId,
};

use crate::backend::Backend;
use crate::sampler::Scratch;
use prefix::Travelling;
use run::{Phase, Run};

pub use prefix::Prefix;
pub use run::{
    Delivered, EngineEvent, ExportedSpan, Outbox, Prefilled, RunStats, SpanExport, Work,
    sampler_digest,
};
pub use step::StepReport;

/// Bounds of one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Sequences (choices) in the batch at most.
    pub max_sequences: usize,
    /// Requests that wait for a place at most; more are refused.
    pub max_waiting: usize,
    /// Prefill tokens in one step at most.
    pub prefill_chunk_tokens: usize,
    /// The same in steps that have decodes.
    pub mixed_prefill_tokens: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_sequences: 64,
            max_waiting: 256,
            prefill_chunk_tokens: 512,
            mixed_prefill_tokens: 64,
        }
    }
}

/// What routers and operators see of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStatus {
    pub running: usize,
    pub waiting: usize,
    /// Reservations whose KV has not arrived, and prefixes on their way to or from here.
    pub reserved: usize,
    /// Prompt tokens that are still to be computed.
    pub waiting_tokens: usize,
    pub pool: PoolStats,
    pub counters: EngineCounters,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineCounters {
    pub steps: u64,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
    pub preemptions: u64,
    pub finished: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub nan_logits: u64,
    pub received_spans: u64,
}

/// One engine: a backend, its block pool and the requests on it.
pub struct Engine {
    backend: Box<dyn Backend>,
    fingerprint: ModelFingerprint,
    config: EngineConfig,
    limits: Limits,
    pool: BlockPool,
    /// By number of arrival: lower is older.
    runs: BTreeMap<u64, Run>,
    numbers: HashMap<RequestId, u64>,
    /// Prefixes on their way between two caches.
    travelling: HashMap<TransferId, Travelling>,
    next_number: u64,
    counters: EngineCounters,
    scratch: Scratch,
    /// Prefill tokens in one step at most, whatever the configuration says: what bounds a step's
    /// time on a slow machine.
    chunk_most_tokens: usize,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("runs", &self.runs.len()).finish_non_exhaustive()
    }
}

impl Engine {
    pub fn new(
        backend: Box<dyn Backend>,
        fingerprint: ModelFingerprint,
        config: EngineConfig,
    ) -> Self {
        let layout = backend.kv_layout();
        let pool = BlockPool::new(backend.kv_blocks(), layout.block_tokens as usize);
        let limits = Limits::for_model(backend.spec());
        let config = EngineConfig {
            max_sequences: config.max_sequences.min(backend.max_logit_rows()),
            prefill_chunk_tokens: config.prefill_chunk_tokens.min(backend.max_step_tokens()),
            ..config
        };
        Self {
            backend,
            fingerprint,
            config,
            limits,
            pool,
            runs: BTreeMap::new(),
            numbers: HashMap::new(),
            travelling: HashMap::new(),
            next_number: 0,
            counters: EngineCounters::default(),
            scratch: Scratch::default(),
            chunk_most_tokens: usize::MAX,
        }
    }

    /// Bounds the prefill tokens of one step; at least one.
    pub fn bound_chunks(&mut self, most_tokens: usize) {
        self.chunk_most_tokens = most_tokens.max(1);
    }

    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Queues a request; its events go to `outbox`, the last of them exactly once.
    ///
    /// # Errors
    /// `InvalidArgument`, `ResourceExhausted` where the queue is full or the pool could never
    /// hold it; the outbox has then got nothing.
    pub fn submit(
        &mut self,
        request: GenerateRequest,
        delivered: &[Delivered],
        work: Work,
        outbox: Box<dyn Outbox>,
        now: Instant,
    ) -> Result<(), Error> {
        self.check(&request, delivered)?;
        if self.waiting() >= self.config.max_waiting {
            return Err(Error::exhausted(
                format!("{} requests wait already", self.config.max_waiting),
                500,
            ));
        }
        let mut run = self.new_run(request, delivered, work, outbox, now);
        if !self.ends_with_delivered(&mut run, now) {
            self.check_fits(&run)?;
            self.add(run);
        }
        Ok(())
    }

    /// Stops a request and frees what it holds; its outbox gets `Cancelled`.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        self.fail(id, Error::new(ErrorCode::Cancelled, "the request was cancelled"))
    }

    /// Ends a request with an error. Returns whether it was here.
    pub fn fail(&mut self, id: RequestId, error: Error) -> bool {
        let Ok(number) = self.number(id) else { return false };
        self.end_with(number, error);
        true
    }

    /// Whether a request with this id is here, in whatever phase.
    pub fn contains(&self, id: RequestId) -> bool {
        self.numbers.contains_key(&id)
    }

    /// Whether a step would have anything to do, other than wait for other nodes.
    pub fn has_work(&self) -> bool {
        self.runs.values().any(|run| !matches!(run.phase, Phase::Reserved(_)))
    }

    /// The earliest deadline of all requests.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.runs.values().map(|run| run.deadline).min()
    }

    pub fn status(&self) -> EngineStatus {
        let count = |wanted: fn(&Phase) -> bool| {
            self.runs.values().filter(|run| wanted(&run.phase)).count()
        };
        let missing = |run: &Run| match &run.phase {
            Phase::Waiting => run.request.prompt.len(),
            Phase::Prompt(table) => run.request.prompt.len() - table.len(),
            Phase::Reserved(_) | Phase::Answering(_) => 0,
        };
        EngineStatus {
            running: count(|phase| matches!(phase, Phase::Prompt(_) | Phase::Answering(_))),
            waiting: self.waiting(),
            reserved: count(|phase| matches!(phase, Phase::Reserved(_))) + self.travelling.len(),
            waiting_tokens: self.runs.values().map(missing).sum(),
            pool: self.pool.stats(),
            counters: self.counters,
        }
    }

    /// What the prefix index has stored and dropped since the last call.
    pub fn drain_block_events(&mut self) -> Vec<BlockEvent> {
        self.pool.drain_events()
    }

    fn check(&self, request: &GenerateRequest, delivered: &[Delivered]) -> Result<(), Error> {
        request.validate(&self.limits)?;
        check_delivered(request, delivered, &self.limits)?;
        if self.numbers.contains_key(&request.id) {
            return Err(Error::new(
                ErrorCode::FailedPrecondition,
                format!("request {} runs here already", request.id),
            ));
        }
        Ok(())
    }

    fn new_run(
        &self,
        request: GenerateRequest,
        delivered: &[Delivered],
        work: Work,
        outbox: Box<dyn Outbox>,
        now: Instant,
    ) -> Run {
        let key = self.hash_key(&request.tenant_salt);
        Run::new(request, delivered, work, outbox, key, now)
    }

    /// Under which blocks of this tenant are found here.
    fn hash_key(&self, tenant_salt: &[u8]) -> HashKey {
        let (numerics, layout) = (self.backend.numerics(), self.backend.kv_layout());
        HashKey::new(&self.fingerprint, numerics, layout.dtype, tenant_salt)
    }

    /// Says the end of choices whose delivered tokens are all that they have: the node that drew
    /// the last of them may have died before it could. Whether that was every choice; the run has
    /// then said its last word.
    fn ends_with_delivered(&mut self, run: &mut Run, now: Instant) -> bool {
        for choice in 0..run.choices.len() {
            if run.choices[choice].finished {
                continue;
            }
            if let Some(reason) = run.finish_reason(choice, self.backend.spec()) {
                run.choices[choice].finished = true;
                run.emit(EngineEvent::ChoiceFinished { choice: choice as u16, reason });
            }
        }
        let ended = run.choices.iter().all(|choice| choice.finished);
        if ended {
            self.counters.finished += 1;
            run.stats.finished_us = run.since_submission_us(now);
            run.emit(EngineEvent::Finished(run.stats));
        }
        ended
    }

    fn add(&mut self, run: Run) {
        let number = self.next_number;
        self.next_number += 1;
        self.numbers.insert(run.request.id, number);
        self.runs.insert(number, run);
    }

    fn number(&self, id: RequestId) -> Result<u64, Error> {
        self.numbers
            .get(&id)
            .copied()
            .ok_or_else(|| Error::new(ErrorCode::NotFound, format!("request {id} is not here")))
    }

    fn waiting(&self) -> usize {
        self.runs.values().filter(|run| matches!(run.phase, Phase::Waiting)).count()
    }

    /// Choices that hold blocks.
    fn sequences(&self) -> usize {
        let of = |run: &Run| match run.phase {
            Phase::Waiting => 0,
            _ => run.choices.iter().filter(|choice| !choice.finished).count(),
        };
        self.runs.values().map(of).sum()
    }

    /// Gives a run's blocks back; it is `Waiting` then, and computes all that it needs again.
    fn release(&mut self, run: &mut Run) {
        run.is_exact = true;
        match std::mem::replace(&mut run.phase, Phase::Waiting) {
            Phase::Waiting => {}
            Phase::Reserved(mut table) | Phase::Prompt(mut table) => table.release(&mut self.pool),
            Phase::Answering(tables) => {
                tables.into_iter().flatten().for_each(|mut table| table.release(&mut self.pool));
            }
        }
    }

    fn end_with(&mut self, number: u64, error: Error) {
        let mut run = self.runs.remove(&number).expect("numbers name runs");
        self.numbers.remove(&run.request.id);
        self.release(&mut run);
        match error.code {
            ErrorCode::Cancelled => self.counters.cancelled += 1,
            _ => self.counters.failed += 1,
        }
        run.emit(EngineEvent::Failed(error));
    }
}

/// What recovery goes on behind must be what the request can have had.
fn check_delivered(
    request: &GenerateRequest,
    delivered: &[Delivered],
    limits: &Limits,
) -> Result<(), Error> {
    let wrong = |what: String| Err(Error::invalid("delivered", what));
    if delivered.len() > usize::from(request.choices) {
        return wrong(format!("{} answers for {} choices", delivered.len(), request.choices));
    }
    let context = request.context_tokens(limits.context_tokens);
    let most = (context - request.prompt.len()).min(request.stop.max_tokens as usize);
    for before in delivered {
        if before.ids.len() > most {
            return wrong(format!("{} tokens, but at most {most} can come", before.ids.len()));
        }
        if let Some(id) = before.ids.iter().find(|&&id| id as usize >= limits.vocab) {
            return wrong(format!("token id {id} is not in the model's vocabulary"));
        }
    }
    Ok(())
}
