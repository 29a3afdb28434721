//! Requests whose prompt another node computes: blocks reserved, KV placed, and the answer begun.

use std::ops::Range;
use std::time::Instant;

use baton_kv_cache::BlockTable;
use baton_types::{Error, ErrorCode, GenerateRequest, RequestId, TokenOutput};

use super::Engine;
use super::admit::Source;
use super::run::{Delivered, Outbox, Phase, Run, Work, sampler_digest};
use crate::backend::{Backend, Heads, KvSpan};

impl Engine {
    /// Takes blocks for a request whose KV another node computes, or which
    /// [`start`](Self::start) begins here. Returns the leading tokens that need no transfer;
    /// [`GenerateRequest::unseen_prompt`] needs none either.
    ///
    /// # Errors
    /// `ResourceExhausted` at once where there is no room, `InvalidArgument`.
    pub fn reserve(
        &mut self,
        request: GenerateRequest,
        delivered: &[Delivered],
        outbox: Box<dyn Outbox>,
        now: Instant,
    ) -> Result<usize, Error> {
        self.check(&request, delivered)?;
        let mut run = self.new_run(request, delivered, Work::Generate, outbox, now);
        if self.ends_with_delivered(&mut run, now) {
            return Ok(0);
        }
        self.check_fits(&run)?;
        let Some(table) = self.take_blocks(&mut run, Source::Elsewhere) else {
            return Err(Error::exhausted(
                format!(
                    "the prompt needs {} blocks and {} sequences; {} blocks are free, {} of {} \
                     sequences run",
                    self.blocks_wanted(&run),
                    run.request.choices,
                    self.pool.available(),
                    self.sequences(),
                    self.config.max_sequences,
                ),
                250,
            ));
        };
        let cached_tokens = table.len();
        run.phase = Phase::Reserved(table);
        self.add(run);
        Ok(cached_tokens)
    }

    /// Begins to compute a reserved request's prompt here. Returns its leading tokens whose KV is
    /// there. Where blocks were reserved for a part of the prompt only, others are taken for them;
    /// if these have gone meanwhile, the request waits as one that was submitted.
    ///
    /// # Errors
    /// `NotFound`, or `FailedPrecondition` where it runs already.
    pub fn start(&mut self, id: RequestId) -> Result<usize, Error> {
        let number = self.number(id)?;
        let mut run = self.runs.remove(&number).expect("numbers name runs");
        let table = match std::mem::replace(&mut run.phase, Phase::Waiting) {
            Phase::Reserved(table) if table.is_whole() => Some(table),
            Phase::Reserved(mut table) => {
                table.release(&mut self.pool);
                self.take_blocks(&mut run, Source::Here)
            }
            other => {
                run.phase = other;
                self.runs.insert(number, run);
                return Err(Error::new(
                    ErrorCode::FailedPrecondition,
                    format!("request {id} is past its reservation"),
                ));
            }
        };
        let held_tokens = table.as_ref().map_or(0, BlockTable::len);
        run.phase = table.map_or(Phase::Waiting, Phase::Prompt);
        self.runs.insert(number, run);
        Ok(held_tokens)
    }

    /// Places received KV, `payload` in canonical order, into a reservation.
    ///
    /// # Errors
    /// `NotFound` where the reservation is gone, `DataLoss` where the payload does not fit.
    pub fn place(
        &mut self,
        id: RequestId,
        layer: usize,
        tokens: Range<usize>,
        heads: Heads,
        payload: &[u8],
    ) -> Result<(), Error> {
        let number = self.number(id)?;
        let Phase::Reserved(table) = &self.runs[&number].phase else {
            return Err(Error::new(
                ErrorCode::FailedPrecondition,
                format!("request {id} takes no KV any more"),
            ));
        };
        write_received(&mut *self.backend, table, layer, tokens, heads, payload)?;
        self.counters.received_spans += 1;
        Ok(())
    }

    /// Goes on from a complete transfer as if the prompt had been computed here. KV that
    /// `is_converted` is not what this node would have computed: neither it nor what follows is
    /// found by other requests.
    ///
    /// # Errors
    /// `NotFound`; `DataLoss` where the sampler states differ.
    pub fn activate(
        &mut self,
        id: RequestId,
        first_tokens: &[TokenOutput],
        digest: [u8; 32],
        is_converted: bool,
        now: Instant,
    ) -> Result<(), Error> {
        let number = self.number(id)?;
        let mut run = self.runs.remove(&number).expect("numbers name runs");
        let Phase::Reserved(_) = &run.phase else {
            self.runs.insert(number, run);
            return Err(Error::new(
                ErrorCode::FailedPrecondition,
                format!("request {id} is past its reservation"),
            ));
        };
        if let Err(error) = check_first_tokens(&run, first_tokens, digest) {
            self.runs.insert(number, run);
            return Err(error);
        }
        let Phase::Reserved(mut table) = std::mem::replace(&mut run.phase, Phase::Waiting) else {
            unreachable!("checked above");
        };
        table.append(run.request.prompt.len() - table.len());
        run.is_exact = !is_converted;
        if run.is_exact {
            // What no answer sees has not come, though the block around it may be here.
            let unseen = run.request.unseen_prompt();
            let came = if unseen.is_empty() { table.len() } else { unseen.start };
            table.publish(&mut self.pool, &run.prompt_hashes, &run.request.prompt[..came]);
        }
        self.begin_answers(&mut run, table);
        run.started = true;
        run.stats.first_token_us = run.since_submission_us(now);
        for token in first_tokens {
            self.take_token(&mut run, token.clone());
        }
        self.keep_or_finish(number, run, now);
        Ok(())
    }
}

/// Writes what came from another node behind the tokens that are cached.
pub(super) fn write_received(
    backend: &mut dyn Backend,
    table: &BlockTable,
    layer: usize,
    tokens: Range<usize>,
    heads: Heads,
    payload: &[u8],
) -> Result<(), Error> {
    let (token_first, token_count, held) = (tokens.start, tokens.len(), table.len());
    if token_first < held {
        return Err(Error::new(
            ErrorCode::FailedPrecondition,
            format!("token {token_first} lies in the {held} cached ones"),
        ));
    }
    let span = KvSpan { layer, blocks: table.blocks(), token_first, token_count, heads };
    backend
        .write_kv(&span, payload)
        .map_err(|error| Error::new(ErrorCode::DataLoss, error.to_string()))
}

fn check_first_tokens(run: &Run, tokens: &[TokenOutput], digest: [u8; 32]) -> Result<(), Error> {
    let in_order = tokens.iter().enumerate().all(|(at, token)| {
        let choice = run.choices.get(at);
        let next = choice.map(|choice| choice.generated.len() as u32);
        usize::from(token.choice) == at && Some(token.index) == next
    });
    if !in_order || tokens.len() != run.choices.len() {
        return Err(Error::new(ErrorCode::DataLoss, "the commit's first tokens do not fit"));
    }
    let after = run.choices.iter().zip(tokens).map(|(choice, token)| {
        let mut sampler = choice.sampler.clone();
        sampler.push(token.id);
        sampler
    });
    let states: Vec<_> = after.collect();
    if sampler_digest(states.iter()) != digest {
        return Err(Error::new(ErrorCode::DataLoss, "the sampler states of the two nodes differ"));
    }
    Ok(())
}
