use baton_types::{KvDtype, ModelFingerprint, NumericsVersion};

use super::*;
use crate::events::EVENTS_MAX;
use crate::{HashKey, prefix_hashes};

const BLOCK: usize = 16;

fn key() -> HashKey {
    HashKey::new(&ModelFingerprint([1; 32]), &NumericsVersion("n".into()), KvDtype::F32, b"")
}

/// A prompt of one token for each block, repeated over it, with its hashes.
fn prompt(block_tokens: usize, contents: &[TokenId]) -> (Vec<TokenId>, Vec<BlockHash>) {
    let tokens: Vec<TokenId> =
        contents.iter().flat_map(|&token| std::iter::repeat_n(token, block_tokens)).collect();
    let hashes = prefix_hashes(&key(), &tokens);
    (tokens, hashes)
}

/// Allocates and publishes a whole prompt; the blocks stay referenced.
fn publish(pool: &mut BlockPool, contents: &[TokenId]) -> Vec<BlockId> {
    let (tokens, hashes) = prompt(pool.block_tokens(), contents);
    let blocks = pool.alloc(contents.len()).unwrap();
    let mut parent = None;
    for (at, &block) in blocks.iter().enumerate() {
        let hash = pool.hash_of(&hashes, at);
        let own = &tokens[at * pool.block_tokens()..][..pool.block_tokens()];
        assert_eq!(pool.insert(hash, parent, own, block), Inserted::Published);
        parent = Some(hash);
    }
    blocks
}

fn release_all(pool: &mut BlockPool, blocks: &[BlockId]) {
    blocks.iter().rev().for_each(|&block| pool.release(block));
}

#[test]
fn alloc_takes_all_or_nothing() {
    let mut pool = BlockPool::new(4, BLOCK);
    let three = pool.alloc(3).unwrap();
    assert_eq!(pool.alloc(2), Err(OutOfBlocks { wanted: 2, free: 1 }));
    assert_eq!(pool.used(), 3);
    release_all(&mut pool, &three);
    assert_eq!(pool.stats().free_blocks, 4);
}

#[test]
fn a_published_prefix_is_found_and_bounded() {
    let mut pool = BlockPool::new(8, BLOCK);
    let blocks = publish(&mut pool, &[1, 2, 3]);
    release_all(&mut pool, &blocks);
    assert_eq!(pool.stats().cached_blocks, 3);
    let (tokens, hashes) = prompt(BLOCK, &[1, 2, 9]);
    assert_eq!(pool.peek(&hashes), 2);
    assert_eq!(pool.lookup(&hashes, &tokens, 1), blocks[..1]);
    assert_eq!(pool.lookup(&hashes, &tokens, 8), blocks[..2]);
    assert_eq!((pool.references(blocks[0]), pool.references(blocks[1])), (2, 1));
    assert_eq!((pool.stats().query_tokens, pool.stats().hit_tokens), (64, 48));
}

#[test]
fn larger_blocks_use_each_second_hash() {
    let mut pool = BlockPool::new(8, 32);
    let blocks = publish(&mut pool, &[1, 2]);
    let (tokens, hashes) = prompt(32, &[1, 2]);
    assert_eq!(hashes.len(), 4);
    assert_eq!(pool.lookup(&hashes, &tokens, 8), blocks);
    assert_eq!(pool.lookup(&hashes[..3], &tokens[..48], 8), blocks[..1]);
}

#[test]
fn a_collision_of_hashes_is_a_miss() {
    let mut pool = BlockPool::new(8, BLOCK);
    let blocks = publish(&mut pool, &[1]);
    let (_, hashes) = prompt(BLOCK, &[1]);
    let (other, _) = prompt(BLOCK, &[2]);
    assert!(pool.lookup(&hashes, &other, 8).is_empty());
    let fresh = pool.alloc(1).unwrap()[0];
    assert_eq!(pool.insert(hashes[0], None, &other, fresh), Inserted::Collision);
    let (same, _) = prompt(BLOCK, &[1]);
    assert_eq!(pool.insert(hashes[0], None, &same, fresh), Inserted::Duplicate(blocks[0]));
    assert_eq!(pool.insert(hashes[0], None, &same, blocks[0]), Inserted::Already);
}

#[test]
fn an_orphan_is_not_published() {
    let mut pool = BlockPool::new(8, BLOCK);
    let (tokens, hashes) = prompt(BLOCK, &[1, 2]);
    let block = pool.alloc(1).unwrap()[0];
    let outcome = pool.insert(hashes[1], Some(hashes[0]), &tokens[BLOCK..], block);
    assert_eq!(outcome, Inserted::ParentMissing);
}

#[test]
fn leaves_go_first_and_the_least_recent_chain_before_others() {
    let mut pool = BlockPool::new(4, BLOCK);
    let old = publish(&mut pool, &[1, 2]);
    release_all(&mut pool, &old);
    let new = publish(&mut pool, &[3, 4]);
    release_all(&mut pool, &new);
    pool.drain_events();
    assert_eq!(pool.alloc(1).unwrap(), [old[1]]);
    assert_eq!(pool.alloc(1).unwrap(), [old[0]]);
    assert_eq!(pool.alloc(1).unwrap(), [new[1]]);
    let (_, hashes) = prompt(BLOCK, &[1, 2]);
    let removed: Vec<_> = pool.drain_events();
    assert_eq!(removed[..2], [1, 0].map(|at| BlockEvent::Removed { hash: hashes[at] }));
}

#[test]
fn depth_outweighs_a_little_recency_but_not_much() {
    let turnover = 64;
    let depth_blocks = 32;
    let deep: Vec<TokenId> = (100..100 + depth_blocks).collect();
    for (idle_blocks, survives) in [(2, true), (turnover, false)] {
        let mut pool = BlockPool::new(turnover as usize, BLOCK);
        let chain = publish(&mut pool, &deep);
        release_all(&mut pool, &chain);
        for _ in 0..idle_blocks {
            let passing = pool.alloc(1).unwrap();
            release_all(&mut pool, &passing);
        }
        let shallow = publish(&mut pool, &[1]);
        release_all(&mut pool, &shallow);
        let free = pool.stats().free_blocks;
        pool.alloc(free + 1).unwrap();
        let (_, hashes) = prompt(BLOCK, &deep);
        assert_eq!(pool.peek(&hashes) == depth_blocks as usize, survives, "{idle_blocks}");
    }
}

#[test]
fn a_parent_without_holders_goes_when_nothing_else_can() {
    let mut pool = BlockPool::new(3, BLOCK);
    let first = publish(&mut pool, &[1]);
    let (tokens, hashes) = prompt(BLOCK, &[1, 2]);
    let own = pool.alloc(2).unwrap();
    let duplicate = pool.insert(hashes[0], None, &tokens[..BLOCK], own[0]);
    assert_eq!(duplicate, Inserted::Duplicate(first[0]));
    pool.release(first[0]);
    assert_eq!((pool.available(), pool.used()), (1, 2));
    let child = pool.insert(hashes[1], Some(hashes[0]), &tokens[BLOCK..], own[1]);
    assert_eq!(child, Inserted::Published);
    // The first block is cached before one that is used, and found as long as it can be.
    assert_eq!((pool.available(), pool.used(), pool.peek(&hashes)), (1, 2, 2));
    pool.drain_events();
    assert_eq!(pool.alloc(1).unwrap(), first);
    let removed = [1, 0].map(|at| BlockEvent::Removed { hash: hashes[at] });
    assert_eq!((pool.drain_events(), pool.peek(&hashes)), (removed.to_vec(), 0));
    pool.release(own[1]);
    assert_eq!((pool.available(), pool.stats().free_blocks), (1, 1));
}

#[test]
fn a_chain_before_used_blocks_is_evicted_from_its_end() {
    let mut pool = BlockPool::new(5, BLOCK);
    let chain = publish(&mut pool, &[1, 2, 3, 4, 5]);
    chain[..3].iter().rev().for_each(|&block| pool.release(block));
    assert_eq!((pool.available(), pool.used(), pool.stats().cached_blocks), (3, 2, 3));
    let (_, hashes) = prompt(BLOCK, &[1, 2, 3, 4, 5]);
    for left in [2, 1, 0] {
        assert_eq!(pool.alloc(1).unwrap(), [chain[left]]);
        assert_eq!(pool.peek(&hashes), left);
    }
    assert_eq!(pool.references(chain[4]), 1);
    assert!(pool.alloc(1).is_err());
}

#[test]
fn a_pinned_block_outlives_its_references() {
    let mut pool = BlockPool::new(1, BLOCK);
    let block = pool.alloc(1).unwrap()[0];
    pool.pin(block);
    pool.pin(block);
    pool.release(block);
    assert_eq!((pool.used(), pool.available(), pool.stats().pinned_blocks), (1, 0, 1));
    pool.unpin(block);
    assert!(pool.alloc(1).is_err());
    pool.unpin(block);
    assert_eq!((pool.used(), pool.available(), pool.stats().pinned_blocks), (0, 1, 0));
}

#[test]
#[cfg_attr(miri, ignore = "tens of thousands of hashes take an interpreter an hour")]
fn too_many_events_become_a_reset_and_the_whole_index() {
    let mut pool = BlockPool::new(2, BLOCK);
    for content in 0..EVENTS_MAX as TokenId {
        let blocks = publish(&mut pool, &[content]);
        release_all(&mut pool, &blocks);
    }
    let events = pool.drain_events();
    assert_eq!(events[0], BlockEvent::Reset);
    assert_eq!(events.len(), 3);
    assert_eq!(pool.drain_events(), []);
}

#[test]
fn clearing_spares_what_is_held() {
    let mut pool = BlockPool::new(8, BLOCK);
    let blocks = publish(&mut pool, &[1, 2, 3]);
    pool.release(blocks[2]);
    pool.clear_cache();
    let (_, hashes) = prompt(BLOCK, &[1, 2, 3]);
    assert_eq!((pool.peek(&hashes), pool.stats().cached_blocks), (2, 0));
}

#[test]
#[should_panic(expected = "is not held")]
fn a_double_release_is_a_bug() {
    let mut pool = BlockPool::new(1, BLOCK);
    let block = pool.alloc(1).unwrap()[0];
    pool.release(block);
    pool.release(block);
}

#[test]
#[should_panic(expected = "is free")]
fn a_free_block_cannot_be_retained() {
    BlockPool::new(1, BLOCK).retain(BlockId(0));
}
