use super::*;
use proptest::prelude::*;

fn decode(run: usize, done_tokens: usize) -> PlanSequence {
    let held_blocks = done_tokens.div_ceil(16);
    PlanSequence {
        run,
        done_tokens,
        pending_tokens: 1,
        held_blocks,
        exclusive_blocks: held_blocks,
        copy_on_write: false,
        all_rows: false,
    }
}

fn prefill(run: usize, pending_tokens: usize) -> PlanSequence {
    let held_blocks = pending_tokens.div_ceil(16);
    PlanSequence { pending_tokens, held_blocks, exclusive_blocks: held_blocks, ..decode(run, 0) }
}

const BUDGET: StepBudget = StepBudget {
    tokens: 512,
    prefill_tokens: 512,
    mixed_prefill_tokens: 64,
    logit_rows: 64,
    free_blocks: 100,
    block_tokens: 16,
};

#[test]
fn decodes_come_first_and_bound_the_prefill_beside_them() {
    let sequences = [prefill(0, 1_000), decode(1, 20), decode(2, 30)];
    assert_eq!(plan_step(&sequences, &BUDGET).chunks, [(1, 1), (2, 1), (0, 64)]);
    assert_eq!(plan_step(&sequences[..1], &BUDGET).chunks, [(0, 512)]);
}

#[test]
fn prefills_share_the_budget_in_order_of_arrival() {
    let sequences = [prefill(0, 500), prefill(1, 100)];
    assert_eq!(plan_step(&sequences, &BUDGET).chunks, [(0, 500), (1, 12)]);
}

#[test]
fn a_prompt_with_logprobs_takes_no_more_tokens_than_rows() {
    let sequences = [PlanSequence { all_rows: true, ..prefill(0, 500) }];
    assert_eq!(plan_step(&sequences, &BUDGET).chunks, [(0, 64)]);
}

#[test]
fn the_newest_gives_way_when_blocks_run_out() {
    let budget = StepBudget { free_blocks: 1, ..BUDGET };
    let sequences = [decode(0, 32), decode(1, 32), decode(2, 33)];
    let plan = plan_step(&sequences, &budget);
    assert_eq!(plan.preempt, [2]);
    assert_eq!(plan.chunks, [(0, 1), (1, 1)]);
}

#[test]
fn a_lonely_run_without_room_is_preempted_itself() {
    let budget = StepBudget { free_blocks: 0, ..BUDGET };
    let plan = plan_step(&[decode(0, 32)], &budget);
    assert_eq!(plan, StepPlan { chunks: vec![], preempt: vec![0] });
}

#[test]
fn a_run_that_was_placed_already_gives_its_promised_blocks_back() {
    // Two choices of run 0, the second of which needs more than there is; run 1 holds one block.
    let budget = StepBudget { free_blocks: 1, ..BUDGET };
    let sequences = [decode(0, 32), decode(1, 15), decode(0, 48)];
    let plan = plan_step(&sequences, &budget);
    assert_eq!(plan.preempt, [1]);
    assert_eq!(plan.chunks, [(0, 1), (2, 1)]);
}

fn any_sequence() -> impl Strategy<Value = PlanSequence> {
    (0_usize..6, 0_usize..100, 1_usize..300, any::<bool>(), any::<bool>()).prop_map(
        |(run, done_tokens, pending, cow, all_rows)| PlanSequence {
            pending_tokens: if pending > 200 { 1 } else { pending },
            copy_on_write: cow,
            all_rows,
            ..decode(run, done_tokens)
        },
    )
}

proptest! {
    #[test]
    fn every_bound_holds_and_something_goes_on(
        mut sequences in prop::collection::vec(any_sequence(), 1..12),
        tokens in 1_usize..600,
        free_blocks in 0_usize..40,
        logit_rows in 1_usize..20,
    ) {
        sequences.sort_by_key(|sequence| sequence.run);
        let budget = StepBudget { tokens, free_blocks, logit_rows, ..BUDGET };
        let plan = plan_step(&sequences, &budget);
        let mut blocks = 0;
        let mut rows = 0;
        for &(at, tokens) in &plan.chunks {
            let s = &sequences[at];
            prop_assert!(tokens >= 1 && tokens <= s.pending_tokens);
            prop_assert!(!plan.preempt.contains(&s.run));
            blocks += (s.done_tokens + tokens).div_ceil(16).saturating_sub(s.held_blocks);
            blocks += usize::from(s.copy_on_write);
            rows += if s.all_rows { tokens } else { 1 };
        }
        let freed: usize = sequences
            .iter()
            .filter(|s| plan.preempt.contains(&s.run))
            .map(|s| s.exclusive_blocks)
            .sum();
        prop_assert!(blocks <= free_blocks + freed);
        prop_assert!(rows <= logit_rows);
        prop_assert!(plan.chunks.iter().map(|chunk| chunk.1).sum::<usize>() <= tokens);
        let oldest = sequences[0].run;
        prop_assert!(!plan.chunks.is_empty() || plan.preempt.contains(&oldest));
    }
}
