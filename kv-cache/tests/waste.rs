//! How much of what is allocated holds live tokens, over lengths of a public trace.

#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use baton_kv_cache::{BlockPool, BlockTable};

const POOL_BLOCKS: usize = 8_192;

/// Answers that are generated at once, as far as the pool goes.
const SEQUENCES_MAX: usize = 64;

/// (prompt tokens, generated tokens)
fn lengths() -> VecDeque<(usize, usize)> {
    let rows = include_str!("data/azure2023_conv_lengths.csv").lines();
    let rows = rows.filter(|line| !line.starts_with('#'));
    let pair = |line: &str| {
        let (prompt, generated) = line.split_once(',').unwrap();
        (prompt.parse().unwrap(), generated.parse().unwrap())
    };
    rows.map(pair).collect()
}

/// Live tokens over allocated slots, summed over every step of every answer.
fn used_share(block_tokens: usize) -> f64 {
    let mut pool = BlockPool::new(POOL_BLOCKS, block_tokens);
    let mut waiting = lengths();
    let mut running: Vec<(BlockTable, usize)> = Vec::new();
    let (mut live, mut allocated) = (0u64, 0u64);
    while !(waiting.is_empty() && running.is_empty()) {
        while running.len() < SEQUENCES_MAX
            && let Some(&(prompt, generated)) = waiting.front()
        {
            let mut table = BlockTable::new(&pool);
            // As the engine admits: the prompt, and room for one token more.
            if table.reserve(&mut pool, prompt + 1).is_err() {
                assert!(!running.is_empty(), "the pool is too small for a prompt of {prompt}");
                table.release(&mut pool);
                break;
            }
            table.append(prompt);
            running.push((table, generated));
            waiting.pop_front();
        }
        let mut next = Vec::with_capacity(running.len());
        for (mut table, left) in running {
            // One that finds no room is preempted: here it just ends.
            let stays = left > 0 && table.reserve(&mut pool, table.len() + 1).is_ok();
            if stays {
                table.append(1);
                next.push((table, left - 1));
            } else {
                table.release(&mut pool);
            }
        }
        running = next;
        live += running.iter().map(|(table, _)| table.len() as u64).sum::<u64>();
        allocated += (pool.used() * block_tokens) as u64;
    }
    assert_eq!(pool.used(), 0);
    live as f64 / allocated as f64
}

#[test]
#[cfg_attr(miri, ignore = "replays a day of requests")]
fn allocated_slots_hold_live_tokens() {
    for (block_tokens, least) in [(16, 0.99), (32, 0.98), (64, 0.96)] {
        let share = used_share(block_tokens);
        eprintln!("blocks of {block_tokens} tokens: {:.2} % live", share * 100.0);
        assert!(share >= least, "blocks of {block_tokens} tokens: {share}");
    }
}
