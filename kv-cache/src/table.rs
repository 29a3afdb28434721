//! The blocks of one sequence.

use std::ops::Range;

use baton_types::{BlockHash, BlockId, HASH_UNIT_TOKENS, TokenId};

use crate::{BlockPool, Inserted, OutOfBlocks};

#[cfg(test)]
mod tests;

/// The blocks that hold positions `0..len` of one sequence, and room behind them; one reference
/// on each. Where a sequence never reads some positions again, [`BlockId::NONE`] may stand in place
/// of their blocks.
///
/// It must end with [`release`](Self::release): one that is dropped leaks its blocks, which
/// [`BlockPool::used`] shows.
#[derive(Debug)]
#[must_use = "its blocks leak without `release`"]
pub struct BlockTable {
    block_tokens: usize,
    blocks: Vec<BlockId>,
    len_tokens: usize,
    /// Leading blocks that are published, or were found in the cache.
    published_blocks: usize,
}

/// An order to the backend: copy the first `tokens` tokens of a block, over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyBlock {
    pub from: BlockId,
    pub to: BlockId,
    pub tokens: usize,
}

impl BlockTable {
    /// A sequence without blocks.
    pub fn new(pool: &BlockPool) -> Self {
        Self::from_cached(pool, Vec::new())
    }

    /// A sequence that begins with what [`BlockPool::lookup`] found; takes its references over.
    pub fn from_cached(pool: &BlockPool, blocks: Vec<BlockId>) -> Self {
        let block_tokens = pool.block_tokens();
        let (published_blocks, len_tokens) = (blocks.len(), blocks.len() * block_tokens);
        Self { block_tokens, blocks, len_tokens, published_blocks }
    }

    /// In order of position; the last ones may lie behind `len`.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens whose KV is in the blocks.
    pub fn len(&self) -> usize {
        self.len_tokens
    }

    pub fn is_empty(&self) -> bool {
        self.len_tokens == 0
    }

    /// Blocks that it holds.
    pub fn held(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.iter().copied().filter(|&block| block != BlockId::NONE)
    }

    /// Whether it holds a block for every position that there is room for.
    pub fn is_whole(&self) -> bool {
        !self.blocks.contains(&BlockId::NONE)
    }

    /// Tokens that the blocks have room for.
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len() * self.block_tokens
    }

    /// Makes room for `tokens` tokens in all. What is there already stays.
    ///
    /// # Errors
    /// `OutOfBlocks`, with nothing changed.
    pub fn reserve(&mut self, pool: &mut BlockPool, tokens: usize) -> Result<(), OutOfBlocks> {
        let missing = tokens.div_ceil(self.block_tokens).saturating_sub(self.blocks.len());
        self.blocks.extend(pool.alloc(missing)?);
        Ok(())
    }

    /// As [`reserve`](Self::reserve), with no blocks for what lies wholly within the tokens
    /// `unseen` and has none yet.
    ///
    /// # Errors
    /// `OutOfBlocks`, with nothing changed.
    pub fn reserve_around(
        &mut self,
        pool: &mut BlockPool,
        unseen: Range<usize>,
        tokens: usize,
    ) -> Result<(), OutOfBlocks> {
        let (first, end) = (self.blocks.len(), tokens.div_ceil(self.block_tokens));
        let unseen = self.blocks_within(unseen);
        let skipped = |at: &usize| unseen.contains(at);
        let count = (first..end).filter(|at| !skipped(at)).count();
        let mut fresh = pool.alloc(count)?.into_iter();
        let mut next = |at| if skipped(&at) { None } else { fresh.next() };
        self.blocks.extend((first..end).map(|at| next(at).unwrap_or(BlockId::NONE)));
        Ok(())
    }

    /// Gives the blocks back that lie wholly within the tokens `unseen`, which this sequence
    /// never reads again. Published ones stay cached.
    pub fn forget(&mut self, pool: &mut BlockPool, unseen: Range<usize>) {
        let unseen = self.blocks_within(unseen);
        let end = unseen.end.min(self.blocks.len());
        // All before the last that is given back were given back before, or are now.
        for block in self.blocks[unseen.start.min(end)..end].iter_mut().rev() {
            match std::mem::replace(block, BlockId::NONE) {
                BlockId::NONE => break,
                held => pool.release(held),
            }
        }
    }

    fn blocks_within(&self, tokens: Range<usize>) -> Range<usize> {
        tokens.start.div_ceil(self.block_tokens)..tokens.end / self.block_tokens
    }

    /// Says that KV of `tokens` more tokens has been written.
    ///
    /// # Panics
    /// Where there was no room for them.
    pub fn append(&mut self, tokens: usize) {
        self.len_tokens += tokens;
        assert!(self.len_tokens <= self.capacity_tokens(), "no room was reserved");
    }

    /// A second sequence with the same content; every block is shared, the partial tail and
    /// reserved room too. Each must `make_writable` before it writes.
    pub fn fork(&self, pool: &mut BlockPool) -> Self {
        self.held().for_each(|block| pool.retain(block));
        Self { blocks: self.blocks.clone(), ..*self }
    }

    /// Prepares a write at `position`: where its block is shared or published, the sequence
    /// gets one of its own. The copy that is returned must be made before any other block is
    /// written. A write over several blocks needs a call for each.
    ///
    /// # Errors
    /// `OutOfBlocks`, with nothing changed.
    ///
    /// # Panics
    /// Where `position` is outside the room reserved.
    pub fn make_writable(
        &mut self,
        pool: &mut BlockPool,
        position: usize,
    ) -> Result<Option<CopyBlock>, OutOfBlocks> {
        let at = position / self.block_tokens;
        let from = self.blocks[at];
        if pool.is_writable(from) {
            return Ok(None);
        }
        let to = pool.alloc(1)?[0];
        pool.release(from);
        self.blocks[at] = to;
        self.published_blocks = self.published_blocks.min(at);
        let tokens = position % self.block_tokens;
        Ok((tokens > 0).then_some(CopyBlock { from, to, tokens }))
    }

    /// Publishes every full block that is not yet and has a hash: `hashes` are the
    /// [`prefix_hashes`](crate::prefix_hashes) of `tokens`, which begin the sequence and may be
    /// shorter or longer than `len`, or only the first of them. Where another sequence has
    /// published the same content first, that block takes the place of this sequence's own, so
    /// equal blocks are held once. Returns how many blocks are new in the index.
    pub fn publish(
        &mut self,
        pool: &mut BlockPool,
        hashes: &[BlockHash],
        tokens: &[TokenId],
    ) -> usize {
        let hashed = tokens.len().min(hashes.len() * HASH_UNIT_TOKENS);
        let full = self.len_tokens.min(hashed) / self.block_tokens;
        let mut new = 0;
        for at in self.published_blocks..full {
            let own = self.blocks[at];
            if own == BlockId::NONE {
                break;
            }
            let parent = at.checked_sub(1).map(|before| pool.hash_of(hashes, before));
            let content = &tokens[at * self.block_tokens..][..self.block_tokens];
            match pool.insert(pool.hash_of(hashes, at), parent, content, own) {
                Inserted::Published => new += 1,
                Inserted::Already => {}
                Inserted::Duplicate(older) => {
                    pool.retain(older);
                    pool.release(own);
                    self.blocks[at] = older;
                }
                Inserted::ParentMissing | Inserted::Collision => break,
            }
            self.published_blocks = at + 1;
        }
        new
    }

    /// Forgets all but the first `tokens` tokens and gives back the blocks behind them.
    ///
    /// # Panics
    /// Where the sequence is shorter.
    pub fn truncate(&mut self, pool: &mut BlockPool, tokens: usize) {
        assert!(tokens <= self.len_tokens, "truncate never grows");
        let keep = tokens.div_ceil(self.block_tokens);
        let given_back = self.blocks.drain(keep..).rev().filter(|&block| block != BlockId::NONE);
        given_back.for_each(|block| pool.release(block));
        self.len_tokens = tokens;
        self.published_blocks = self.published_blocks.min(tokens / self.block_tokens);
    }

    /// Gives every block back; the table is empty afterwards.
    pub fn release(&mut self, pool: &mut BlockPool) {
        self.truncate(pool, 0);
    }
}
