//! Every block of one node: who holds it, and under which hash others may find it.

use std::collections::{BTreeSet, HashMap};

use baton_types::{BlockHash, BlockId, HASH_UNIT_TOKENS, TokenId};

use crate::OutOfBlocks;
use crate::events::{BlockEvent, EventLog};

mod evict;
#[cfg(test)]
mod tests;

/// Where attention over the context costs as much as the rest of a layer, so that a token at
/// this depth costs twice what the first one cost.
pub const ATTENTION_PARITY_TOKENS: u64 = 4096;

/// A pool of `capacity` blocks, each of `block_tokens` tokens over all layers.
///
/// A block is *free*, *used* (referenced or pinned), or *cached* (published in the prefix index
/// and neither referenced nor pinned). Every operation takes O(log n) for each block it touches.
///
/// # Panics
/// All methods panic on a block outside the pool, and where a count would fall below zero or a
/// free block is named: bugs of the caller, never of the world.
#[derive(Debug)]
pub struct BlockPool {
    block_tokens: usize,
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    index: HashMap<BlockHash, BlockId>,
    /// Published blocks that nobody holds and no published block continues, cheapest first.
    evictable: BTreeSet<(u64, BlockId)>,
    used_blocks: usize,
    pinned_blocks: usize,
    /// Blocks handed out so far: the clock of last use.
    clock_blocks: u64,
    evicted_blocks: u64,
    query_tokens: u64,
    hit_tokens: u64,
    events: EventLog,
}

#[derive(Debug, Default)]
struct Block {
    references: u32,
    pins: u32,
    /// Published continuations that somebody holds; each holds this block too.
    held_children: u32,
    /// Published continuations.
    children: u32,
    /// Rank among the evictable, set when the last hold goes.
    keep_rank: u64,
    published: Option<Published>,
}

#[derive(Debug)]
struct Published {
    hash: BlockHash,
    parent: Option<BlockId>,
    tokens: Box<[TokenId]>,
    prefix_tokens: usize,
}

/// Why a block is held.
#[derive(Clone, Copy)]
enum Hold {
    Reference,
    Pin,
    HeldChild,
}

/// What became of a block that was to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// Others can find it from now on.
    Published,
    /// The very block was published before.
    Already,
    /// This older block has the same content and stays the published one.
    Duplicate(BlockId),
    /// The prefix before it is not published (any more), so nobody could find it.
    ParentMissing,
    /// Another prefix has the same hash; it keeps its place.
    Collision,
}

/// Gauges and counters of a pool. `free + used + cached = capacity`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    pub capacity_blocks: usize,
    pub free_blocks: usize,
    /// Referenced or pinned.
    pub used_blocks: usize,
    /// Published, neither referenced nor pinned.
    pub cached_blocks: usize,
    /// Pinned, whether referenced or not.
    pub pinned_blocks: usize,
    /// Evicted since the start.
    pub evicted_blocks: u64,
    /// Tokens that lookups asked for, in complete blocks.
    pub query_tokens: u64,
    /// Tokens that lookups found.
    pub hit_tokens: u64,
}

impl BlockPool {
    /// A pool of free blocks.
    ///
    /// # Panics
    /// Where `block_tokens` is no multiple of [`HASH_UNIT_TOKENS`], or `capacity` exceeds u32.
    pub fn new(capacity: usize, block_tokens: usize) -> Self {
        assert!(
            block_tokens > 0 && block_tokens.is_multiple_of(HASH_UNIT_TOKENS),
            "a block holds whole hash units"
        );
        let capacity_ids = u32::try_from(capacity).expect("block ids are 32 bits");
        Self {
            block_tokens,
            blocks: (0..capacity).map(|_| Block::default()).collect(),
            free: (0..capacity_ids).rev().map(BlockId).collect(),
            index: HashMap::new(),
            evictable: BTreeSet::new(),
            used_blocks: 0,
            pinned_blocks: 0,
            clock_blocks: 0,
            evicted_blocks: 0,
            query_tokens: 0,
            hit_tokens: 0,
            events: EventLog::default(),
        }
    }

    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    pub fn capacity(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that an `alloc` could have now: the free ones and the cached ones, all of which it
    /// may evict.
    pub fn available(&self) -> usize {
        self.blocks.len() - self.used_blocks
    }

    /// Blocks that are referenced or pinned. Zero when nothing runs, or something has leaked.
    pub fn used(&self) -> usize {
        self.used_blocks
    }

    pub fn stats(&self) -> PoolStats {
        PoolStats {
            capacity_blocks: self.blocks.len(),
            free_blocks: self.free.len(),
            used_blocks: self.used_blocks,
            cached_blocks: self.blocks.len() - self.free.len() - self.used_blocks,
            pinned_blocks: self.pinned_blocks,
            evicted_blocks: self.evicted_blocks,
            query_tokens: self.query_tokens,
            hit_tokens: self.hit_tokens,
        }
    }

    /// Takes `count` blocks with one reference each, evicting cached ones as necessary.
    ///
    /// # Errors
    /// `OutOfBlocks`, with nothing allocated or evicted.
    pub fn alloc(&mut self, count: usize) -> Result<Vec<BlockId>, OutOfBlocks> {
        let free = self.available();
        if count > free {
            return Err(OutOfBlocks { wanted: count, free });
        }
        Ok((0..count).map(|_| self.alloc_one()).collect())
    }

    /// References of a block; 0 for a free or merely cached one.
    pub fn references(&self, block: BlockId) -> u32 {
        self.block(block).references
    }

    /// Whether its only holder may write into it: nobody else refers to it or can find it.
    pub fn is_writable(&self, block: BlockId) -> bool {
        let block = self.block(block);
        block.references == 1 && block.published.is_none()
    }

    /// Adds a reference to a block that is referenced, pinned or cached.
    pub fn retain(&mut self, block: BlockId) {
        self.assert_not_free(block);
        self.add_hold(block, Hold::Reference);
    }

    /// Takes a reference back. With the last hold gone a published block stays as cached, any
    /// other is free.
    pub fn release(&mut self, block: BlockId) {
        self.drop_hold(block, Hold::Reference);
    }

    /// Keeps a block from being evicted or reused while a transfer reads or writes it, even
    /// after its last reference has gone.
    pub fn pin(&mut self, block: BlockId) {
        self.assert_not_free(block);
        self.add_hold(block, Hold::Pin);
        self.pinned_blocks += usize::from(self.block(block).pins == 1);
    }

    /// Ends one `pin`.
    pub fn unpin(&mut self, block: BlockId) {
        self.drop_hold(block, Hold::Pin);
        self.pinned_blocks -= usize::from(self.block(block).pins == 0);
    }

    /// The longest cached prefix: its blocks in order, each with a reference for the caller.
    ///
    /// `hashes` are the [`prefix_hashes`](crate::prefix_hashes) of `tokens`; `most_blocks`
    /// bounds the answer (a prompt's last token is never taken from the cache, as its logits
    /// are needed). Tokens are compared, so a collision of hashes is a miss.
    pub fn lookup(
        &mut self,
        hashes: &[BlockHash],
        tokens: &[TokenId],
        most_blocks: usize,
    ) -> Vec<BlockId> {
        let asked = most_blocks
            .min(hashes.len() * HASH_UNIT_TOKENS / self.block_tokens)
            .min(tokens.len() / self.block_tokens);
        let mut found: Vec<BlockId> = Vec::new();
        for content in tokens.chunks_exact(self.block_tokens).take(asked) {
            let hash = self.hash_of(hashes, found.len());
            match self.index.get(&hash) {
                Some(&block) if self.holds(block, found.last().copied(), content) => {
                    found.push(block);
                }
                _ => break,
            }
        }
        found.iter().for_each(|&block| self.retain(block));
        self.clock_blocks += found.len() as u64;
        self.query_tokens += (asked * self.block_tokens) as u64;
        self.hit_tokens += (found.len() * self.block_tokens) as u64;
        found
    }

    /// Blocks that a lookup would find, by hash alone; nothing is retained or counted.
    pub fn peek(&self, hashes: &[BlockHash]) -> usize {
        let most = hashes.len() * HASH_UNIT_TOKENS / self.block_tokens;
        (0..most).take_while(|&at| self.index.contains_key(&self.hash_of(hashes, at))).count()
    }

    /// The hash, among those of a prompt, under which its block number `at` is published.
    pub fn hash_of(&self, hashes: &[BlockHash], at: usize) -> BlockHash {
        hashes[(at + 1) * (self.block_tokens / HASH_UNIT_TOKENS) - 1]
    }

    /// Publishes a full block that the caller holds. `parent` is the hash of the block before
    /// it, `None` for a prompt's first; `tokens` are the block's own.
    ///
    /// A block published once must never be written again.
    pub fn insert(
        &mut self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        tokens: &[TokenId],
        block: BlockId,
    ) -> Inserted {
        assert_eq!(tokens.len(), self.block_tokens, "only full blocks are published");
        self.assert_not_free(block);
        let parent_block = match parent.map(|parent| self.index.get(&parent).copied()) {
            Some(None) => return Inserted::ParentMissing,
            Some(Some(found)) => Some(found),
            None => None,
        };
        match self.index.get(&hash) {
            Some(&older) if !self.holds(older, parent_block, tokens) => {
                return Inserted::Collision;
            }
            Some(&older) if older == block => return Inserted::Already,
            Some(&older) => return Inserted::Duplicate(older),
            None => {}
        }
        assert!(self.block(block).published.is_none(), "block {block} has another hash");
        let before = parent_block.map_or(0, |parent| self.prefix_tokens(parent));
        let prefix_tokens = before + self.block_tokens;
        if let Some(parent) = parent_block {
            self.add_hold(parent, Hold::HeldChild);
            self.block_mut(parent).children += 1;
        }
        self.index.insert(hash, block);
        self.block_mut(block).published =
            Some(Published { hash, parent: parent_block, tokens: tokens.into(), prefix_tokens });
        let prefix_tokens = prefix_tokens as u32;
        self.events.push(BlockEvent::Stored { hash, parent, prefix_tokens });
        Inserted::Published
    }

    /// Changes of the index since the last call; after an overflow a `Reset` and the whole
    /// index.
    pub fn drain_events(&mut self) -> Vec<BlockEvent> {
        self.events.take().unwrap_or_else(|| self.published())
    }

    /// A `Reset` and then the whole index, parents first: where a new follower begins. It must
    /// be told all that `drain_events` yields afterwards.
    pub fn published(&self) -> Vec<BlockEvent> {
        let mut stored: Vec<_> =
            self.blocks.iter().filter_map(|block| block.published.as_ref()).collect();
        stored.sort_by_key(|published| published.prefix_tokens);
        let stored = stored.into_iter().map(|published| BlockEvent::Stored {
            hash: published.hash,
            parent: published.parent.map(|parent| self.published_of(parent).hash),
            prefix_tokens: published.prefix_tokens as u32,
        });
        std::iter::once(BlockEvent::Reset).chain(stored).collect()
    }

    fn alloc_one(&mut self) -> BlockId {
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict_any().expect("what is neither free nor used is cached"),
        };
        self.clock_blocks += 1;
        self.used_blocks += 1;
        self.block_mut(block).references = 1;
        block
    }

    /// A published block that gets its first hold leaves the evictable and holds its parent.
    fn add_hold(&mut self, first: BlockId, hold: Hold) {
        let was_used = self.block(first).is_used();
        let (mut at, mut hold) = (first, hold);
        loop {
            let block = self.block_mut(at);
            let was_held = block.is_held();
            *block.count_mut(hold) += 1;
            let rank = block.keep_rank;
            let parent = match &block.published {
                Some(published) if !was_held => published.parent,
                _ => break,
            };
            self.evictable.remove(&(rank, at));
            match parent {
                Some(parent) => (at, hold) = (parent, Hold::HeldChild),
                None => break,
            }
        }
        self.count_used(first, was_used);
    }

    /// The opposite of `add_hold`.
    fn drop_hold(&mut self, first: BlockId, hold: Hold) {
        let was_used = self.block(first).is_used();
        let (mut at, mut hold) = (first, hold);
        loop {
            let block = self.block_mut(at);
            let count = block.count_mut(hold);
            *count = count.checked_sub(1).unwrap_or_else(|| panic!("block {at} is not held"));
            if block.is_held() {
                break;
            }
            let Some(published) = &block.published else {
                self.free.push(at);
                break;
            };
            let (parent, prefix_tokens) = (published.parent, published.prefix_tokens);
            let rank = self.keep_rank(prefix_tokens);
            let block = self.block_mut(at);
            block.keep_rank = rank;
            if block.children == 0 {
                self.evictable.insert((rank, at));
            }
            match parent {
                Some(parent) => (at, hold) = (parent, Hold::HeldChild),
                None => break,
            }
        }
        self.count_used(first, was_used);
    }

    /// Time of last use, as blocks handed out, plus the cost to recompute: a block
    /// [`ATTENTION_PARITY_TOKENS`] deeper costs one first block more and is kept as if it had
    /// been used one turnover of the pool later.
    fn keep_rank(&self, prefix_tokens: usize) -> u64 {
        let turnover_blocks = self.blocks.len() as u64;
        self.clock_blocks + prefix_tokens as u64 * turnover_blocks / ATTENTION_PARITY_TOKENS
    }

    fn count_used(&mut self, block: BlockId, was_used: bool) {
        match (was_used, self.block(block).is_used()) {
            (false, true) => self.used_blocks += 1,
            (true, false) => self.used_blocks -= 1,
            _ => {}
        }
    }

    /// Whether a published block holds these tokens after that parent.
    fn holds(&self, block: BlockId, parent: Option<BlockId>, tokens: &[TokenId]) -> bool {
        let published = self.published_of(block);
        published.parent == parent && *published.tokens == *tokens
    }

    fn prefix_tokens(&self, block: BlockId) -> usize {
        self.published_of(block).prefix_tokens
    }

    fn published_of(&self, block: BlockId) -> &Published {
        self.block(block).published.as_ref().expect("the index names published blocks only")
    }

    fn block(&self, block: BlockId) -> &Block {
        &self.blocks[block.0 as usize]
    }

    fn block_mut(&mut self, block: BlockId) -> &mut Block {
        &mut self.blocks[block.0 as usize]
    }

    fn assert_not_free(&self, block: BlockId) {
        let state = self.block(block);
        assert!(state.is_held() || state.published.is_some(), "block {block} is free");
    }
}

impl Block {
    /// Referenced or pinned.
    fn is_used(&self) -> bool {
        self.references > 0 || self.pins > 0
    }

    /// Used, or before a block that is.
    fn is_held(&self) -> bool {
        self.is_used() || self.held_children > 0
    }

    fn count_mut(&mut self, hold: Hold) -> &mut u32 {
        match hold {
            Hold::Reference => &mut self.references,
            Hold::Pin => &mut self.pins,
            Hold::HeldChild => &mut self.held_children,
        }
    }
}
