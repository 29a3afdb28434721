//! The blocks of one sequence.

use baton_types::{BlockHash, BlockId, TokenId};

use crate::{BlockPool, Inserted, OutOfBlocks};

#[cfg(test)]
mod tests;

/// The blocks that hold positions `0..len` of one sequence, and room behind them; one reference
/// on each.
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
        self.blocks.iter().for_each(|&block| pool.retain(block));
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

    /// Publishes every full block that is not yet: `hashes` are the
    /// [`prefix_hashes`](crate::prefix_hashes) of `tokens`, which begin the sequence and may be
    /// shorter or longer than `len`. Where another sequence has published the same content
    /// first, that block takes the place of this sequence's own, so equal blocks are held once.
    /// Returns how many blocks are new in the index.
    pub fn publish(
        &mut self,
        pool: &mut BlockPool,
        hashes: &[BlockHash],
        tokens: &[TokenId],
    ) -> usize {
        let full = self.len_tokens.min(tokens.len()) / self.block_tokens;
        let mut new = 0;
        for at in self.published_blocks..full {
            let own = self.blocks[at];
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
        self.blocks.drain(keep..).rev().for_each(|block| pool.release(block));
        self.len_tokens = tokens;
        self.published_blocks = self.published_blocks.min(tokens / self.block_tokens);
    }

    /// Gives every block back; the table is empty afterwards.
    pub fn release(&mut self, pool: &mut BlockPool) {
        self.truncate(pool, 0);
    }
}
