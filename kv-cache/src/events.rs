//! What changed in a pool's prefix index, for the routers that follow it.

use std::collections::VecDeque;

use baton_types::BlockHash;

/// Most events that wait to be drained; beyond it they are replaced by a `Reset`.
pub const EVENTS_MAX: usize = 16_384;

/// One change of the prefix index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// Forget all that was said before; what is still published follows at once.
    Reset,
    /// The prefix that ends with this block can be reused here.
    Stored {
        hash: BlockHash,
        /// The block before it; `None` for the first one of a prompt.
        parent: Option<BlockHash>,
        /// Length of the whole prefix, this block included.
        prefix_tokens: u32,
    },
    /// It can no longer.
    Removed { hash: BlockHash },
}

/// Events since the last drain, or the note that there were too many.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    waiting: VecDeque<BlockEvent>,
    overflowed: bool,
}

impl EventLog {
    pub(crate) fn push(&mut self, event: BlockEvent) {
        if self.overflowed {
            return;
        }
        if self.waiting.len() == EVENTS_MAX {
            self.waiting.clear();
            self.overflowed = true;
            return;
        }
        self.waiting.push_back(event);
    }

    /// Empties the log. `None` says that events were lost and a `Reset` is due.
    pub(crate) fn take(&mut self) -> Option<Vec<BlockEvent>> {
        let lost = std::mem::take(&mut self.overflowed);
        let events = std::mem::take(&mut self.waiting).into();
        (!lost).then_some(events)
    }
}
