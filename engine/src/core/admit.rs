//! Who gets blocks, and who gives them back.

use std::time::Instant;

use baton_kv_cache::BlockTable;
use baton_types::{Error, ErrorCode, GenerateRequest};

use super::run::{Phase, Run};
use super::{Engine, Work};

/// Who computes a prompt's KV.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Here,
    /// Another node, which sends only what answers see.
    Elsewhere,
}

impl Engine {
    /// Ends what is past its deadline.
    pub(super) fn expire(&mut self, now: Instant) {
        let late: Vec<u64> = self
            .runs
            .iter()
            .filter(|(_, run)| run.deadline <= now)
            .map(|(&number, _)| number)
            .collect();
        for number in late {
            let ms = self.runs[&number].request.deadline_ms;
            let message = format!("the request's deadline of {ms} ms has passed");
            self.end_with(number, Error::new(ErrorCode::DeadlineExceeded, message));
        }
    }

    /// Lets waiting requests in, oldest first. One that does not fit holds back the younger ones,
    /// so that a large request does not starve.
    pub(super) fn admit(&mut self) {
        let waiting: Vec<u64> = self
            .runs
            .iter()
            .filter(|(_, run)| matches!(run.phase, Phase::Waiting))
            .map(|(&number, _)| number)
            .collect();
        for number in waiting {
            let mut run = self.runs.remove(&number).expect("it was just listed");
            if let Err(error) = self.check_fits(&run) {
                self.runs.insert(number, run);
                self.end_with(number, error);
                continue;
            }
            let table = self.take_blocks(&mut run, Source::Here);
            let admitted = table.is_some();
            if let Some(table) = table {
                self.export_cached(&mut run, &table);
                run.phase = Phase::Prompt(table);
            }
            self.runs.insert(number, run);
            if !admitted {
                break;
            }
        }
    }

    /// Blocks that a run needs to go on at all: the prompt's, shared by its choices, and each
    /// choice's own tail with room for one token more.
    pub(super) fn blocks_wanted(&self, run: &Run) -> usize {
        let block_tokens = self.pool.block_tokens();
        let most = self.blocks_most(&run.request);
        let prompt = run.request.prompt.len();
        if matches!(run.work, Work::Prefill { .. }) {
            return prompt.div_ceil(block_tokens).min(most);
        }
        let open = run.choices.iter().filter(|choice| !choice.finished);
        let most = open.clone().count().saturating_mul(most);
        let tails = open.map(|choice| {
            (prompt % block_tokens + choice.generated.len() + 1).div_ceil(block_tokens)
        });
        (prompt / block_tokens + tails.sum::<usize>()).min(most)
    }

    /// Blocks that one sequence of a request holds at once, at most: those of its sinks, and of its
    /// window with the tokens that one step computes.
    fn blocks_most(&self, request: &GenerateRequest) -> usize {
        let block_tokens = self.pool.block_tokens();
        request.streaming_attention.map_or(usize::MAX, |streaming| {
            let moving = streaming.window as usize + self.config.prefill_chunk_tokens;
            let moving = moving.div_ceil(block_tokens) + 1;
            (streaming.sinks as usize).div_ceil(block_tokens) + moving
        })
    }

    /// # Errors
    /// `ResourceExhausted`, with no time to retry, where the whole pool is too small.
    pub(super) fn check_fits(&self, run: &Run) -> Result<(), Error> {
        let (wanted, capacity) = (self.blocks_wanted(run), self.pool.capacity());
        if wanted <= capacity && run.choices.len() <= self.config.max_sequences {
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::ResourceExhausted,
            format!(
                "the request needs {wanted} KV blocks and {} sequences, but this node has only \
                 {capacity} and {}; shorten it, lower n, or give the node a larger pool",
                run.choices.len(),
                self.config.max_sequences
            ),
        ))
    }

    /// Blocks for the whole prompt, or for as much of it as is held at once, beginning with what
    /// the prefix cache holds of it; `None` where there is no room now.
    pub(super) fn take_blocks(&mut self, run: &mut Run, source: Source) -> Option<BlockTable> {
        // Each running sequence may need one block at its next step.
        let running = self.sequences();
        let room = self.pool.available() >= self.blocks_wanted(run) + running;
        let open = run.choices.iter().filter(|choice| !choice.finished).count();
        if !(room || running == 0) || running + open > self.config.max_sequences {
            return None;
        }
        let prompt = &run.request.prompt;
        // The last token is computed in any case: its logits are needed. Log-probabilities of
        // the prompt need all of them.
        let reusable = if run.wants_prompt_logprobs() { 0 } else { prompt.len() - 1 };
        let block_tokens = self.pool.block_tokens();
        let (unseen, reusable, end) = match source {
            Source::Elsewhere if !run.request.unseen_prompt().is_empty() => {
                let unseen = run.request.unseen_prompt();
                (unseen.clone(), reusable.min(unseen.start), prompt.len())
            }
            Source::Here | Source::Elsewhere => {
                let held = self.blocks_most(&run.request).saturating_mul(block_tokens);
                (0..0, reusable, prompt.len().min(held))
            }
        };
        let found = self.pool.lookup(&run.prompt_hashes, prompt, reusable / block_tokens);
        let mut table = BlockTable::from_cached(&self.pool, found);
        if table.reserve_around(&mut self.pool, unseen, end).is_err() {
            table.release(&mut self.pool);
            return None;
        }
        run.stats.cached_tokens = table.len() as u32;
        Some(table)
    }

    /// Starts each unfinished choice from the prompt's blocks.
    pub(super) fn begin_answers(&mut self, run: &mut Run, mut prompt: BlockTable) {
        prompt.truncate(&mut self.pool, run.request.prompt.len());
        prompt.forget(&mut self.pool, run.request.unseen_prompt());
        let tables = (0..run.choices.len()).map(|at| {
            let choice = &run.choices[at];
            (!choice.finished).then(|| self.fork_for(run, at, &prompt))
        });
        let tables: Vec<_> = tables.collect();
        prompt.release(&mut self.pool);
        run.phase = Phase::Answering(tables);
    }

    /// The blocks of one choice: what the prefix cache holds of its prompt and answer, where that
    /// is more than the prompt.
    fn fork_for(&mut self, run: &Run, choice: usize, prompt: &BlockTable) -> BlockTable {
        let generated = run.choices[choice].generated.len();
        if generated > self.pool.block_tokens() {
            let tokens = run.tokens_of(choice);
            let hashes = run.hashes_of(&tokens);
            let most_blocks = (tokens.len() - 1) / self.pool.block_tokens();
            let found = self.pool.lookup(&hashes, &tokens, most_blocks);
            let mut longer = BlockTable::from_cached(&self.pool, found);
            if longer.len() > prompt.len() {
                return longer;
            }
            longer.release(&mut self.pool);
        }
        prompt.fork(&mut self.pool)
    }

    /// Gives back the blocks of a sequence that its tokens from `table.len()` on do not see. While
    /// it has `missing` tokens of a prompt to compute, it takes as many ahead, so that others do
    /// not take what it is about to need.
    pub(super) fn slide(
        &mut self,
        request: &GenerateRequest,
        table: &mut BlockTable,
        missing: usize,
    ) {
        let Some(streaming) = request.streaming_attention else { return };
        table.forget(&mut self.pool, streaming.unseen(table.len()));
        let ahead = table.len() + missing.min(self.config.prefill_chunk_tokens);
        // Where shared blocks brought no room, the planner makes some.
        let _planned_later = table.reserve(&mut self.pool, ahead);
    }

    /// Sends a run back to the queue; it keeps the tokens that it has.
    pub(super) fn preempt(&mut self, number: u64) {
        let mut run = self.runs.remove(&number).expect("the planner names runs");
        self.release(&mut run);
        run.prompt_logprobs.clear();
        run.stats.preemptions += 1;
        self.counters.preemptions += 1;
        self.runs.insert(number, run);
    }
}
