//! Which (layer, head, token) of a grant have arrived.

use std::ops::Range;

use crate::frame::{FrameKey, WireLayout};

/// A bit for each `[layer][head][token]` that must come.
#[derive(Debug)]
pub(crate) struct Coverage {
    layers: usize,
    heads: usize,
    tokens: Range<u32>,
    words_per_row: usize,
    words: Vec<u64>,
    missing: u64,
}

/// How a frame's place relates to what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    New,
    Whole,
    /// Some of it is there: frames must tile, so this is no frame of an honest sender.
    Part,
    Outside,
}

impl Coverage {
    /// Nothing of `tokens` has arrived yet, and of those that are `unseen` nothing must.
    pub(crate) fn new(layout: &WireLayout, tokens: Range<u32>, unseen: Range<u32>) -> Self {
        let (layers, heads) = (usize::from(layout.layers), usize::from(layout.kv_heads));
        let words_per_row = tokens.len().div_ceil(64);
        let missing = (layers * heads * tokens.len()) as u64;
        let words = vec![0; layers * heads * words_per_row];
        let unseen = unseen.start.max(tokens.start)..unseen.end.min(tokens.end);
        let mut coverage = Self { layers, heads, tokens, words_per_row, words, missing };
        for layer in 0..if unseen.is_empty() { 0 } else { layout.layers } {
            coverage.mark(&FrameKey {
                layer,
                token_first: unseen.start,
                token_count: unseen.len() as u32,
                head_first: 0,
                head_count: layout.kv_heads,
            });
        }
        coverage
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    pub(crate) fn place_of(&self, key: &FrameKey) -> Place {
        let token_end = u64::from(key.token_first) + u64::from(key.token_count);
        let head_end = usize::from(key.head_first) + usize::from(key.head_count);
        let inside = usize::from(key.layer) < self.layers
            && head_end <= self.heads
            && key.token_first >= self.tokens.start
            && token_end <= u64::from(self.tokens.end);
        if !inside {
            return Place::Outside;
        }
        let there: u64 = self.rows(key).map(|row| self.count(row, key)).sum();
        match there {
            0 => Place::New,
            all if all == u64::from(key.head_count) * u64::from(key.token_count) => Place::Whole,
            _ => Place::Part,
        }
    }

    /// Marks a frame that is [`Place::New`].
    pub(crate) fn mark(&mut self, key: &FrameKey) {
        for row in self.rows(key) {
            for (word, mask) in self.masks(row, key) {
                self.words[word] |= mask;
            }
        }
        self.missing -= u64::from(key.head_count) * u64::from(key.token_count);
    }

    /// Ranges that have not arrived, at most `most` of them.
    pub(crate) fn gaps(&self, most: usize) -> Vec<FrameKey> {
        let mut gaps = Vec::new();
        for layer in 0..self.layers {
            for head in 0..self.heads {
                let mut tokens = self.tokens.clone().peekable();
                while let Some(first) = tokens.find(|&token| !self.is_set(layer, head, token)) {
                    let mut count = 1;
                    while tokens.next_if(|&token| !self.is_set(layer, head, token)).is_some() {
                        count += 1;
                    }
                    gaps.push(FrameKey {
                        layer: layer as u16,
                        token_first: first,
                        token_count: count,
                        head_first: head as u16,
                        head_count: 1,
                    });
                    if gaps.len() == most {
                        return gaps;
                    }
                }
            }
        }
        gaps
    }

    fn is_set(&self, layer: usize, head: usize, token: u32) -> bool {
        let bit = (token - self.tokens.start) as usize;
        let row = (layer * self.heads + head) * self.words_per_row;
        self.words[row + bit / 64] >> (bit % 64) & 1 == 1
    }

    fn rows(&self, key: &FrameKey) -> Range<usize> {
        let first = usize::from(key.layer) * self.heads + usize::from(key.head_first);
        first..first + usize::from(key.head_count)
    }

    fn count(&self, row: usize, key: &FrameKey) -> u64 {
        self.masks(row, key).map(|(at, mask)| u64::from((self.words[at] & mask).count_ones())).sum()
    }

    /// The words of one row that hold a frame's tokens, with the bits that do.
    fn masks(&self, row: usize, key: &FrameKey) -> impl Iterator<Item = (usize, u64)> + use<> {
        let first = (key.token_first - self.tokens.start) as usize;
        let end = first + key.token_count as usize;
        let row_at = row * self.words_per_row;
        (first / 64..end.div_ceil(64)).map(move |word| {
            let low = first.saturating_sub(word * 64);
            let high = (end - word * 64).min(64);
            (row_at + word, (u64::MAX >> (64 - (high - low))) << low)
        })
    }
}

#[cfg(test)]
mod tests {
    use baton_types::KvDtype;

    use super::*;

    fn key(token_first: u32, token_count: u32, head_first: u16, head_count: u16) -> FrameKey {
        FrameKey { layer: 1, token_first, token_count, head_first, head_count }
    }

    #[test]
    fn ranges_are_new_once_and_then_whole() {
        let layout = WireLayout { layers: 2, kv_heads: 3, head_dim: 4, dtype: KvDtype::F32 };
        let mut coverage = Coverage::new(&layout, 10..210, 0..0);
        assert_eq!(coverage.place_of(&key(10, 200, 0, 3)), Place::New);
        coverage.mark(&key(60, 90, 0, 2));
        assert_eq!(coverage.place_of(&key(60, 90, 0, 2)), Place::Whole);
        assert_eq!(coverage.place_of(&key(100, 3, 1, 1)), Place::Whole);
        assert_eq!(coverage.place_of(&key(60, 90, 1, 2)), Place::Part);
        assert_eq!(coverage.place_of(&key(150, 60, 0, 3)), Place::New);
        for outside in [key(9, 2, 0, 1), key(209, 2, 0, 1), key(10, 1, 2, 2)] {
            assert_eq!(coverage.place_of(&outside), Place::Outside);
        }
        assert_eq!(coverage.gaps(99).len(), 3 + 2 + 2 + 1);
        for gap in coverage.gaps(99) {
            coverage.mark(&gap);
        }
        assert!(coverage.is_complete() && coverage.gaps(99).is_empty());
    }

    #[test]
    fn what_is_not_seen_need_not_come() {
        let layout = WireLayout { layers: 2, kv_heads: 3, head_dim: 4, dtype: KvDtype::F32 };
        for unseen in [4..150, 5..10, 40..210, 60..61, 0..220] {
            let coverage = Coverage::new(&layout, 10..210, unseen.clone());
            let wanted = (10..210).filter(|token| !unseen.contains(token)).count();
            assert_eq!(coverage.missing, 2 * 3 * wanted as u64, "{unseen:?}");
            let gaps = coverage.gaps(99);
            assert!(gaps.iter().all(|gap| coverage.place_of(gap) == Place::New));
            let sum: u32 = gaps.iter().map(|gap| gap.token_count).sum();
            assert_eq!(u64::from(sum), coverage.missing);
        }
    }
}
