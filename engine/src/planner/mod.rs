//! Decides what one step computes. Pure: it sees shapes, never tensors, blocks or clocks.
//!
//! Decodes come first, oldest first; what is left of the token budget goes to prefill chunks.
//! Where blocks run out, the newest runs give theirs back and are computed again later.

#[cfg(test)]
mod tests;

/// One sequence that wants to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanSequence {
    /// Which run it belongs to; runs are numbered by arrival, lower is older.
    pub run: usize,
    /// Tokens whose KV is there.
    pub done_tokens: usize,
    /// Tokens to compute before the next draw: 1 for a decode.
    pub pending_tokens: usize,
    /// Blocks that it holds, and those that only it holds: what preempting it brings.
    pub held_blocks: usize,
    pub exclusive_blocks: usize,
    /// Whether the block of the next position must be copied before it is written.
    pub copy_on_write: bool,
    /// Whether every computed token yields a row of logits.
    pub all_rows: bool,
}

/// Bounds of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBudget {
    pub tokens: usize,
    /// Prefill tokens in a step without decodes.
    pub prefill_tokens: usize,
    /// Prefill tokens in a step that has decodes: bounds how long those wait.
    pub mixed_prefill_tokens: usize,
    pub logit_rows: usize,
    pub free_blocks: usize,
    pub block_tokens: usize,
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// (index of the sequence, tokens), in the order of computation.
    pub chunks: Vec<(usize, usize)>,
    /// Runs to preempt before anything is computed.
    pub preempt: Vec<usize>,
}

/// Plans one step. `sequences` are in order of arrival.
///
/// At least one sequence goes on unless the oldest run alone needs more blocks than there are;
/// then it is in `preempt` and nothing is computed.
pub fn plan_step(sequences: &[PlanSequence], budget: &StepBudget) -> StepPlan {
    let mut step = Step {
        sequences,
        budget,
        free_blocks: budget.free_blocks,
        tokens: budget.tokens,
        rows: budget.logit_rows,
        plan: StepPlan::default(),
    };
    let (decodes, prefills): (Vec<usize>, Vec<usize>) =
        (0..sequences.len()).partition(|&at| sequences[at].pending_tokens == 1);
    for at in decodes {
        step.place(at, 1);
    }
    let most = match step.plan.chunks.is_empty() {
        true => budget.prefill_tokens,
        false => budget.mixed_prefill_tokens,
    };
    step.tokens = step.tokens.min(most);
    for at in prefills {
        step.place(at, sequences[at].pending_tokens);
    }
    step.plan
}

struct Step<'a> {
    sequences: &'a [PlanSequence],
    budget: &'a StepBudget,
    free_blocks: usize,
    tokens: usize,
    rows: usize,
    plan: StepPlan,
}

impl Step<'_> {
    fn place(&mut self, at: usize, wanted: usize) {
        let sequence = self.sequences[at];
        let rows = if sequence.all_rows { self.rows } else { usize::MAX };
        let tokens = wanted.min(self.tokens).min(rows);
        if tokens == 0 || self.rows == 0 || self.plan.preempt.contains(&sequence.run) {
            return;
        }
        let blocks = self.blocks_for(&sequence, tokens);
        while blocks > self.free_blocks {
            let victim = self.newest_alive().expect("the sequence's own run is alive");
            self.preempt(victim);
            if victim == sequence.run {
                return;
            }
        }
        self.free_blocks -= blocks;
        self.tokens -= tokens;
        self.rows -= if sequence.all_rows { tokens } else { 1 };
        self.plan.chunks.push((at, tokens));
    }

    fn blocks_for(&self, sequence: &PlanSequence, tokens: usize) -> usize {
        let all = (sequence.done_tokens + tokens).div_ceil(self.budget.block_tokens);
        all.saturating_sub(sequence.held_blocks) + usize::from(sequence.copy_on_write)
    }

    fn newest_alive(&self) -> Option<usize> {
        let alive = |run: &usize| !self.plan.preempt.contains(run);
        self.sequences.iter().map(|sequence| sequence.run).filter(alive).max()
    }

    /// Takes a run out of the step; its blocks, and those promised to it, are free again.
    fn preempt(&mut self, run: usize) {
        self.plan.preempt.push(run);
        let sequences = self.sequences;
        let own = sequences.iter().filter(|sequence| sequence.run == run);
        self.free_blocks += own.map(|sequence| sequence.exclusive_blocks).sum::<usize>();
        let chunks = std::mem::take(&mut self.plan.chunks);
        for (at, tokens) in chunks {
            let sequence = sequences[at];
            if sequence.run == run {
                self.free_blocks += self.blocks_for(&sequence, tokens);
                self.tokens += tokens;
                self.rows += if sequence.all_rows { tokens } else { 1 };
            } else {
                self.plan.chunks.push((at, tokens));
            }
        }
    }
}
