//! One step: plan, compute, draw.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use baton_kv_cache::{BlockTable, OutOfBlocks};
use baton_types::{BlockId, Error, StreamingAttention, TokenId, TokenOutput};

use super::run::{EngineEvent, ExportedSpan, Phase, Prefilled, Run, Work};
use super::{Engine, sampler_digest};
use crate::backend::{Heads, KvRead, KvSpan, LayerSink, LogitRows, Span};
use crate::planner::{PlanSequence, StepBudget, plan_step};
use crate::sampler::{UnusableLogits, token_logprobs};

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    pub prefill_tokens: usize,
    pub decode_tokens: usize,
}

/// Which sequence it is: of a prompt, or of one choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    number: u64,
    choice: Option<usize>,
}

/// One sequence's part in a step.
struct Chunk {
    owner: Owner,
    tokens: Vec<TokenId>,
    first_position: usize,
    blocks: Vec<BlockId>,
    logits: LogitRows,
    streaming: Option<StreamingAttention>,
}

impl Engine {
    /// Runs one step. Returns what it computed; nothing where nothing could go on.
    pub fn step(&mut self, now: Instant) -> StepReport {
        self.expire(now);
        self.admit();
        let (owners, sequences) = self.sequences_to_plan();
        let plan = plan_step(&sequences, &self.budget());
        for &number in &plan.preempt {
            self.preempt(number as u64);
        }
        let mut chunks = Vec::with_capacity(plan.chunks.len());
        for (at, tokens) in plan.chunks {
            match self.prepare(owners[at], tokens, now) {
                Ok(chunk) => chunks.push(chunk),
                // A block was promised twice; the run waits for its turn.
                Err(OutOfBlocks { .. }) => {
                    let number = owners[at].number;
                    chunks.retain(|chunk: &Chunk| chunk.owner.number != number);
                    self.preempt(number);
                }
            }
        }
        if chunks.is_empty() {
            return StepReport::default();
        }
        self.compute(&chunks, now)
    }

    fn budget(&self) -> StepBudget {
        StepBudget {
            tokens: self.backend.max_step_tokens(),
            prefill_tokens: self.config.prefill_chunk_tokens.min(self.chunk_most_tokens),
            mixed_prefill_tokens: self.config.mixed_prefill_tokens.min(self.chunk_most_tokens),
            logit_rows: self.backend.max_logit_rows(),
            free_blocks: self.pool.available(),
            block_tokens: self.pool.block_tokens(),
        }
    }

    fn sequences_to_plan(&self) -> (Vec<Owner>, Vec<PlanSequence>) {
        let mut owners = Vec::new();
        let mut sequences = Vec::new();
        let mut add = |number: u64, choice, table: &BlockTable, all: usize, all_rows| {
            let blocks = table.blocks();
            let next = blocks.get(table.len() / self.pool.block_tokens());
            owners.push(Owner { number, choice });
            sequences.push(PlanSequence {
                run: number as usize,
                done_tokens: table.len(),
                pending_tokens: all - table.len(),
                held_blocks: blocks.len(),
                exclusive_blocks: self.exclusive_blocks(table),
                copy_on_write: next.is_some_and(|&block| !self.pool.is_writable(block)),
                all_rows,
            });
        };
        for (&number, run) in &self.runs {
            let prompt = run.request.prompt.len();
            match &run.phase {
                Phase::Waiting | Phase::Reserved(_) => {}
                Phase::Prompt(table) => {
                    add(number, None, table, prompt, run.wants_prompt_logprobs());
                }
                Phase::Answering(tables) => {
                    for (at, table) in tables.iter().enumerate() {
                        let all = prompt + run.choices[at].generated.len();
                        if let Some(table) = table {
                            add(number, Some(at), table, all, false);
                        }
                    }
                }
            }
        }
        (owners, sequences)
    }

    fn exclusive_blocks(&self, table: &BlockTable) -> usize {
        table.held().filter(|&block| self.pool.references(block) == 1).count()
    }

    /// Makes room for a chunk and gathers what the backend needs of it.
    fn prepare(&mut self, owner: Owner, count: usize, now: Instant) -> Result<Chunk, OutOfBlocks> {
        let run = self.runs.get_mut(&owner.number).expect("the plan names runs");
        let prompt = run.request.prompt.len();
        let table = table_mut(&mut run.phase, owner.choice);
        let first = table.len();
        let end = first + count;
        let block_tokens = self.pool.block_tokens();
        table.reserve(&mut self.pool, end)?;
        for at in first / block_tokens..end.div_ceil(block_tokens) {
            let position = first.max(at * block_tokens);
            if let Some(copy) = table.make_writable(&mut self.pool, position)? {
                self.backend.copy_block(copy.from, copy.to, copy.tokens);
            }
        }
        let blocks = table.blocks().to_vec();
        if !run.started {
            run.started = true;
            run.stats.queued_us = run.since_submission_us(now);
        }
        let (tokens, all, wants_row) = match owner.choice {
            None => {
                let drawn_from = run.choices.iter().any(|choice| choice.generated.is_empty());
                (run.request.prompt[first..end].to_vec(), prompt, drawn_from)
            }
            Some(at) => {
                let generated = &run.choices[at].generated;
                let tokens = generated[first - prompt..end - prompt].to_vec();
                (tokens, prompt + generated.len(), true)
            }
        };
        let logits = if owner.choice.is_none() && run.wants_prompt_logprobs() {
            LogitRows::All
        } else if end == all && wants_row {
            LogitRows::Last
        } else {
            LogitRows::None
        };
        let streaming = run.request.streaming_attention;
        Ok(Chunk { owner, tokens, first_position: first, blocks, logits, streaming })
    }

    fn compute(&mut self, chunks: &[Chunk], now: Instant) -> StepReport {
        let spans: Vec<Span<'_>> = chunks
            .iter()
            .map(|chunk| Span {
                tokens: &chunk.tokens,
                first_position: chunk.first_position,
                blocks: &chunk.blocks,
                logits: chunk.logits,
                streaming: chunk.streaming,
            })
            .collect();
        let vocab = self.backend.spec().vocab;
        let began = Instant::now();
        let mut sink = ExportSink { runs: &mut self.runs, chunks };
        let backend = &mut self.backend;
        let result = catch_unwind(AssertUnwindSafe(|| {
            backend.step(&spans, &mut sink).map(|logits| logits.to_vec())
        }));
        let logits = match result {
            Ok(Ok(logits)) => logits,
            Ok(Err(error)) => return self.fail_step(chunks, &error.to_string()),
            Err(_) => return self.fail_step(chunks, "the engine panicked in this step"),
        };
        self.counters.steps += 1;
        let now = now + began.elapsed();
        let mut report = StepReport::default();
        let mut rows = logits.chunks_exact(vocab);
        for chunk in chunks {
            let count = match chunk.logits {
                LogitRows::None => 0,
                LogitRows::Last => 1,
                LogitRows::All => chunk.tokens.len(),
            };
            let own: Vec<&[f32]> = rows.by_ref().take(count).collect();
            match (chunk.owner.choice, chunk.tokens.len()) {
                (Some(_), 1) => report.decode_tokens += 1,
                (_, tokens) => report.prefill_tokens += tokens,
            }
            self.advance(chunk, &own, now);
        }
        self.counters.prefill_tokens += report.prefill_tokens as u64;
        self.counters.decode_tokens += report.decode_tokens as u64;
        report
    }

    /// A failed step leaves no trace in its runs; each of them fails.
    fn fail_step(&mut self, chunks: &[Chunk], why: &str) -> StepReport {
        for chunk in chunks {
            if self.runs.contains_key(&chunk.owner.number) {
                self.end_with(chunk.owner.number, Error::internal(why));
            }
        }
        StepReport::default()
    }

    /// Takes a chunk's result over.
    fn advance(&mut self, chunk: &Chunk, rows: &[&[f32]], now: Instant) {
        let number = chunk.owner.number;
        // A choice's failure may have ended the run already.
        let Some(mut run) = self.runs.remove(&number) else { return };
        table_mut(&mut run.phase, chunk.owner.choice).append(chunk.tokens.len());
        let result = match chunk.owner.choice {
            None => self.advance_prompt(&mut run, chunk, rows, now),
            Some(choice) => self.advance_choice(&mut run, choice, rows),
        };
        match result {
            Ok(()) => self.keep_or_finish(number, run, now),
            Err(error) => {
                self.counters.nan_logits += 1;
                self.runs.insert(number, run);
                self.end_with(number, error);
            }
        }
    }

    fn advance_prompt(
        &mut self,
        run: &mut Run,
        chunk: &Chunk,
        rows: &[&[f32]],
        now: Instant,
    ) -> Result<(), Error> {
        run.stats.computed_tokens += chunk.tokens.len() as u32;
        if chunk.logits == LogitRows::All {
            collect_prompt_logprobs(run, chunk.first_position, rows);
        }
        let prompt = run.request.prompt.len();
        let Phase::Prompt(table) = &mut run.phase else { unreachable!("it computes its prompt") };
        table.publish(&mut self.pool, &run.prompt_hashes, &run.request.prompt);
        if table.len() < prompt {
            self.slide(&run.request, table, prompt - table.len());
            return Ok(());
        }
        let Phase::Prompt(mut table) = std::mem::replace(&mut run.phase, Phase::Waiting) else {
            unreachable!("matched above");
        };
        if matches!(run.work, Work::Prefill { .. }) {
            table.release(&mut self.pool);
        } else {
            self.begin_answers(run, table);
        }
        if run.stats.first_token_us == 0 {
            run.stats.first_token_us = run.since_submission_us(now);
        }
        let row = rows.last().copied();
        for choice in 0..run.choices.len() {
            let state = &run.choices[choice];
            if !state.finished && state.generated.is_empty() {
                let row = row.expect("a choice without tokens asked for the last row");
                let token = self.draw(run, choice, row)?;
                self.take_token(run, token);
            }
        }
        Ok(())
    }

    fn advance_choice(
        &mut self,
        run: &mut Run,
        choice: usize,
        rows: &[&[f32]],
    ) -> Result<(), Error> {
        self.publish_answer(run, choice);
        self.slide(&run.request, table_mut(&mut run.phase, Some(choice)), 0);
        let Some(row) = rows.last() else { return Ok(()) };
        let token = self.draw(run, choice, row)?;
        self.take_token(run, token);
        Ok(())
    }

    /// Publishes an answer's blocks as they fill, where they follow from KV of this node's own.
    fn publish_answer(&mut self, run: &mut Run, choice: usize) {
        if !run.is_exact {
            return;
        }
        let done = table_mut(&mut run.phase, Some(choice)).len();
        if done.is_multiple_of(self.pool.block_tokens()) && done <= run.request.cacheable_tokens() {
            let tokens = run.tokens_of(choice);
            let hashes = run.hashes_of(&tokens[..done]);
            let table = table_mut(&mut run.phase, Some(choice));
            table.publish(&mut self.pool, &hashes, &tokens);
        }
    }

    fn draw(&mut self, run: &Run, choice: usize, row: &[f32]) -> Result<TokenOutput, Error> {
        let state = &run.choices[choice];
        let banned = run.banned(choice, self.backend.spec());
        let scratch = &mut self.scratch;
        // What a request's own parameters do to the arithmetic must not end other requests.
        let drawn = catch_unwind(AssertUnwindSafe(|| {
            let id = state.sampler.draw(row, &run.request.sampling, &banned, scratch)?;
            let logprobs = run.request.logprobs.map(|top| token_logprobs(row, id, top.into()));
            Ok::<_, UnusableLogits>((id, logprobs))
        }));
        let (id, logprobs) = match drawn {
            Ok(drawn) => drawn.map_err(|error| Error::internal(error.to_string()))?,
            Err(_) => return Err(Error::internal("the engine panicked drawing a token: a bug")),
        };
        let (choice, index) = (choice as u16, state.generated.len() as u32);
        Ok(TokenOutput { choice, index, id, logprobs })
    }

    /// Appends a token to its answer, tells the client, and ends the choice where it is the last.
    pub(super) fn take_token(&mut self, run: &mut Run, token: TokenOutput) {
        let choice = usize::from(token.choice);
        run.choices[choice].generated.push(token.id);
        run.choices[choice].sampler.push(token.id);
        run.emit(EngineEvent::Token(token.clone()));
        if matches!(run.work, Work::Prefill { .. }) {
            run.first_tokens.push(token);
            return;
        }
        if let Some(reason) = run.finish_reason(choice, self.backend.spec()) {
            run.choices[choice].finished = true;
            if let Phase::Answering(tables) = &mut run.phase
                && let Some(mut table) = tables[choice].take()
            {
                table.release(&mut self.pool);
            }
            run.emit(EngineEvent::ChoiceFinished { choice: choice as u16, reason });
        }
    }

    /// Puts a run back, or says its last word.
    pub(super) fn keep_or_finish(&mut self, number: u64, mut run: Run, now: Instant) {
        let prompt_only = matches!(run.work, Work::Prefill { .. });
        let prefilled = prompt_only && run.choices.iter().all(|c| !c.generated.is_empty());
        if !prefilled && run.choices.iter().any(|choice| !choice.finished) {
            self.runs.insert(number, run);
            return;
        }
        if prefilled {
            let first_tokens = std::mem::take(&mut run.first_tokens);
            run.emit(EngineEvent::Prefilled(Prefilled {
                first_tokens,
                sampler_digest: sampler_digest(run.choices.iter().map(|c| &c.sampler)),
            }));
        }
        self.release(&mut run);
        self.numbers.remove(&run.request.id);
        self.counters.finished += 1;
        run.stats.finished_us = run.since_submission_us(now);
        run.emit(EngineEvent::Finished(run.stats));
    }

    /// Hands out what the prefix cache held of a handoff's prompt.
    pub(super) fn export_cached(&mut self, run: &mut Run, table: &BlockTable) {
        let Work::Prefill { skip_tokens, export } = &mut run.work else { return };
        let wanted = around(*skip_tokens..table.len(), run.request.unseen_prompt());
        for layer in 0..self.backend.spec().layers {
            for tokens in wanted.iter().filter(|tokens| !tokens.is_empty()) {
                let span = KvSpan {
                    layer,
                    blocks: table.blocks(),
                    token_first: tokens.start,
                    token_count: tokens.len(),
                    heads: Heads::All,
                };
                export.export(read_span(self.backend.kv(), &span));
            }
        }
    }
}

/// Hands the KV of handoffs out, layer by layer.
struct ExportSink<'a> {
    runs: &'a mut BTreeMap<u64, Run>,
    chunks: &'a [Chunk],
}

impl LayerSink for ExportSink<'_> {
    fn layer_done(&mut self, layer: usize, kv: &dyn KvRead) {
        for chunk in self.chunks {
            let run = self.runs.get_mut(&chunk.owner.number).expect("a step's runs are there");
            let Work::Prefill { skip_tokens, export } = &mut run.work else { continue };
            let end = chunk.first_position + chunk.tokens.len();
            let first = chunk.first_position.max(*skip_tokens);
            let wanted = around(first..end, run.request.unseen_prompt());
            for tokens in wanted.into_iter().filter(|tokens| !tokens.is_empty()) {
                let span = KvSpan {
                    layer,
                    blocks: &chunk.blocks,
                    token_first: tokens.start,
                    token_count: tokens.len(),
                    heads: Heads::All,
                };
                export.export(read_span(kv, &span));
            }
        }
    }
}

/// What of `tokens` lies before and behind `unseen`.
fn around(tokens: Range<usize>, unseen: Range<usize>) -> [Range<usize>; 2] {
    if unseen.is_empty() {
        return [tokens, 0..0];
    }
    [tokens.start..tokens.end.min(unseen.start), tokens.start.max(unseen.end)..tokens.end]
}

pub(super) fn read_span(kv: &dyn KvRead, span: &KvSpan<'_>) -> ExportedSpan {
    let mut payload = Vec::new();
    kv.read_kv(span, &mut payload);
    ExportedSpan {
        layer: span.layer as u16,
        token_first: span.token_first as u32,
        token_count: span.token_count as u32,
        payload,
    }
}

fn table_mut(phase: &mut Phase, choice: Option<usize>) -> &mut BlockTable {
    match (phase, choice) {
        (Phase::Prompt(table), None) => table,
        (Phase::Answering(tables), Some(at)) => {
            tables[at].as_mut().expect("a finished choice is not planned")
        }
        _ => panic!("a planned sequence has a table in its phase"),
    }
}

/// Rows of prompt positions `first..` give the log-probabilities of the tokens behind them.
fn collect_prompt_logprobs(run: &mut Run, first: usize, rows: &[&[f32]]) {
    let top = run.request.prompt_logprobs.unwrap_or(0);
    for (at, row) in rows.iter().enumerate() {
        if let Some(&next) = run.request.prompt.get(first + at + 1) {
            run.prompt_logprobs.push(token_logprobs(row, next, top.into()));
        }
    }
    if !run.wants_prompt_logprobs() {
        run.emit(EngineEvent::PromptLogprobs(run.prompt_logprobs.clone()));
    }
}
