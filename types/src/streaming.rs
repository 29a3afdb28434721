//! StreamingLLM: attention to a prompt's first tokens and to a window of the last ones.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Prompt and answer of a request with [`StreamingAttention`] at most, in tokens: angles of the
/// rotation are exact to this position and beyond, but a request must end, and its prompt must fit
/// a message between nodes.
pub const STREAMING_TOKENS_MAX: usize = 1 << 20;

/// Prompt and answer together at most, where the model's context holds `model_tokens`.
pub fn context_most(model_tokens: usize, streaming: Option<StreamingAttention>) -> usize {
    streaming.map_or(model_tokens, |_| STREAMING_TOKENS_MAX)
}

/// Attention sinks and a sliding window, with positions relative to the cache (Xiao et al.,
/// "Efficient Streaming Language Models with Attention Sinks", 2023).
///
/// The token at position t sees tokens `0..sinks` and `max(sinks, t - window + 1)..=t`, as if they
/// stood side by side. So nothing is seen from farther than the model was trained for, and what has
/// left the window is forgotten. While t is below `sinks + window` that is full attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StreamingAttention {
    /// First tokens that stay visible; 0 is a plain sliding window.
    pub sinks: u32,
    /// Last tokens that are visible, the one that looks included.
    pub window: u32,
}

impl StreamingAttention {
    /// Tokens that are seen at once, at most. K and V of so many first tokens are those of full
    /// attention, to the bit.
    pub fn cache_tokens(&self) -> usize {
        self.sinks as usize + self.window as usize
    }

    /// Whether the token at `position` no longer sees all before it.
    pub fn is_apart(&self, position: usize) -> bool {
        position >= self.cache_tokens()
    }

    /// Tokens that neither the one at `position` nor any later one sees.
    pub fn unseen(&self, position: usize) -> Range<usize> {
        let sinks = self.sinks as usize;
        sinks..(position + 1).saturating_sub(self.window as usize).max(sinks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_leave_the_window_one_by_one() {
        let streaming = StreamingAttention { sinks: 4, window: 6 };
        assert_eq!(streaming.cache_tokens(), 10);
        for (position, unseen) in [(0, 4..4), (9, 4..4), (10, 4..5), (11, 4..6), (100, 4..95)] {
            assert_eq!(streaming.unseen(position), unseen, "{position}");
            assert_eq!(streaming.is_apart(position), !unseen.is_empty());
        }
        let window = StreamingAttention { sinks: 0, window: 1 };
        assert_eq!(window.unseen(5), 0..5);
    }
}
