//! What is given up where there is no free block.

use baton_types::BlockId;

use super::{Block, BlockPool, Hold};
use crate::events::BlockEvent;

impl BlockPool {
    /// Evicts everything that nobody holds.
    pub fn clear_cache(&mut self) {
        while let Some(block) = self.evict_one() {
            self.free.push(block);
        }
    }

    /// Unpublishes the block whose loss costs least; the caller takes it.
    fn evict_one(&mut self) -> Option<BlockId> {
        let (_, block) = self.evictable.pop_first()?;
        let published =
            self.block_mut(block).published.take().expect("evictable blocks are published");
        self.index.remove(&published.hash);
        self.evicted_blocks += 1;
        self.events.push(BlockEvent::Removed { hash: published.hash });
        if let Some(parent) = published.parent {
            let above = self.block_mut(parent);
            above.children -= 1;
            let (rank, is_leaf) = (above.keep_rank, above.children == 0 && !above.is_held());
            if is_leaf {
                self.evictable.insert((rank, parent));
            }
        }
        Some(block)
    }

    /// As [`evict_one`](Self::evict_one); where every cached block is before a used one, those
    /// behind the deepest of them are unpublished first. Their holders keep them. So it is where
    /// a sequence has given blocks back that lie before others of its own.
    pub(super) fn evict_any(&mut self) -> Option<BlockId> {
        if self.evictable.is_empty() {
            let cached = |block: &&Block| block.published.is_some() && !block.is_used();
            let depth = |block: &&Block| block.published.as_ref().map(|p| p.prefix_tokens);
            let deepest = self.blocks.iter().filter(cached).max_by_key(depth)?;
            let hash = deepest.published.as_ref()?.hash;
            self.unpublish_behind(self.index[&hash]);
        }
        self.evict_one()
    }

    /// Takes every continuation of `block` out of the index.
    fn unpublish_behind(&mut self, block: BlockId) {
        let mut published: Vec<(usize, BlockId, Option<BlockId>)> = (self.index.values())
            .map(|&at| (self.prefix_tokens(at), at, self.published_of(at).parent))
            .collect();
        published.sort_unstable();
        let mut behind = vec![block];
        for (_, at, parent) in published {
            if parent.is_some_and(|parent| behind.contains(&parent)) {
                behind.push(at);
            }
        }
        for at in behind.drain(1..).rev() {
            let published = self.block_mut(at).published.take().expect("the index named it");
            self.index.remove(&published.hash);
            self.events.push(BlockEvent::Removed { hash: published.hash });
            let parent = published.parent.expect("it continues a block");
            self.block_mut(parent).children -= 1;
            self.drop_hold(parent, Hold::HeldChild);
        }
    }
}
