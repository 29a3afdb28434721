//! What one step computes, row by row and tile by tile.

use std::ops::Range;

use baton_types::{BlockId, ModelSpec, STREAMING_TOKENS_MAX, StreamingAttention, TokenId};

use super::pages::Pages;
use crate::backend::{LogitRows, Span};
use crate::kernels::attention::CHUNK_TOKENS;

/// Query rows (tokens times heads of a group) that share the loads of K and V.
pub(super) const TILE_ROWS: usize = 24;

/// Attention is split by chunks of keys when there are fewer units than this for each thread.
pub(super) const UNITS_PER_THREAD: usize = 4;

/// One token of the step.
pub(super) struct Row {
    pub(super) token: TokenId,
    pub(super) position: usize,
    pub(super) span: usize,
    /// What it sees, once that is not all before it.
    pub(super) streaming: Option<StreamingAttention>,
}

/// Consecutive tokens of one span whose last keys lie in the same chunk, and whose first keys
/// within a sliding window do; all or none of them see sinks apart from the window.
pub(super) struct QueryTile {
    pub(super) span: usize,
    /// Rows of the batch.
    pub(super) rows: Range<usize>,
    /// Position of the first.
    pub(super) position: usize,
    /// What they see, once that is not all before them.
    pub(super) streaming: Option<StreamingAttention>,
}

/// One of the chunks of keys that a tile's tokens see.
#[derive(Clone, Copy)]
pub(super) struct KeyChunk {
    /// Its first key.
    pub(super) first: usize,
    /// Whether its keys are seen as sinks: by the queries rotated for these.
    pub(super) is_sinks: bool,
}

impl QueryTile {
    /// How many chunks of keys they see, in layers with a window of so many tokens or with none.
    pub(super) fn chunks(&self, window: Option<usize>) -> usize {
        self.sink_chunks() + self.position / CHUNK_TOKENS + 1 - self.first_chunk(window)
    }

    /// Chunk `at` of these: sinks come first, then the others in ascending order.
    pub(super) fn chunk(&self, at: usize, window: Option<usize>) -> KeyChunk {
        match at.checked_sub(self.sink_chunks()) {
            None => KeyChunk { first: at * CHUNK_TOKENS, is_sinks: true },
            Some(at) => {
                let first = (self.first_chunk(window) + at) * CHUNK_TOKENS;
                KeyChunk { first, is_sinks: false }
            }
        }
    }

    /// Position of the last.
    pub(super) fn last_position(&self) -> usize {
        self.position + self.rows.len() - 1
    }

    /// The keys that the tile's token at `position` sees.
    pub(super) fn keys(
        &self,
        position: usize,
        chunk: KeyChunk,
        window: Option<usize>,
    ) -> Range<usize> {
        let end = chunk.first + CHUNK_TOKENS;
        if chunk.is_sinks {
            return chunk.first..end.min(self.sinks());
        }
        let window = window_of(self.streaming, window);
        first_key(position, window).max(chunk.first)..end.min(position + 1)
    }

    fn sinks(&self) -> usize {
        self.streaming.map_or(0, |streaming| streaming.sinks as usize)
    }

    fn sink_chunks(&self) -> usize {
        self.sinks().div_ceil(CHUNK_TOKENS)
    }

    fn first_chunk(&self, window: Option<usize>) -> usize {
        first_key(self.position, window_of(self.streaming, window)) / CHUNK_TOKENS
    }
}

/// The window of tokens that see their sinks apart from it, or of the layer.
fn window_of(streaming: Option<StreamingAttention>, of_layer: Option<usize>) -> Option<usize> {
    streaming.map(|streaming| streaming.window as usize).or(of_layer)
}

/// The first key that a token at `position` sees.
fn first_key(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// A piece of attention work: of one tile and one KV head, some of the chunks that the tile sees.
pub(super) struct Unit {
    pub(super) tile: usize,
    pub(super) head: usize,
    pub(super) chunks: Range<usize>,
}

/// The attention of one layer.
#[derive(Default)]
pub(super) struct Work {
    /// Longest first, so that threads end together; those of one head together, so that its keys
    /// stay in the caches.
    pub(super) units: Vec<Unit>,
    /// Whether units are single chunks, whose results are merged afterwards.
    pub(super) is_split: bool,
    /// Tokens of the sliding window.
    pub(super) window: Option<usize>,
    /// Keys that the rows see, one by one.
    pub(super) keys_seen: usize,
    /// Keys that the spans see, each once.
    pub(super) keys_read: usize,
}

/// One step.
pub(super) struct Batch<'a> {
    pub(super) rows: Vec<Row>,
    /// Pages of each span.
    pub(super) blocks: Vec<&'a [BlockId]>,
    pub(super) tiles: Vec<QueryTile>,
    /// The attention of layers without a sliding window, and of those with one.
    full: Work,
    windowed: Work,
    /// Rows that need logits, ascending.
    pub(super) logit_rows: Vec<usize>,
}

impl<'a> Batch<'a> {
    /// Lays out `spans`.
    ///
    /// # Panics
    /// When a span leaves the model's context, its blocks or the pool: the planner's bug.
    pub(super) fn plan(
        spans: &[Span<'a>],
        spec: &ModelSpec,
        pages: &Pages,
        threads: usize,
    ) -> Self {
        let mut batch = Self {
            rows: Vec::new(),
            blocks: Vec::with_capacity(spans.len()),
            tiles: Vec::new(),
            full: Work::default(),
            windowed: Work::default(),
            logit_rows: Vec::new(),
        };
        let group = spec.heads / spec.kv_heads;
        let window = spec.features.window.as_ref().map(|window| window.tokens);
        for (index, span) in spans.iter().enumerate() {
            check_span(span, spec, pages);
            let first = batch.rows.len();
            batch.blocks.push(span.blocks);
            batch.rows.extend(span.tokens.iter().enumerate().map(|(i, token)| Row {
                token: *token,
                position: span.first_position + i,
                span: index,
                streaming: apart(span, span.first_position + i),
            }));
            batch.push_tiles(index, first, span, (TILE_ROWS / group).max(1), window);
            let end = batch.rows.len();
            match span.logits {
                LogitRows::None => {}
                LogitRows::Last => batch.logit_rows.extend((first..end).next_back()),
                LogitRows::All => batch.logit_rows.extend(first..end),
            }
        }
        batch.full = batch.work(spec.kv_heads, threads, None);
        if window.is_some() {
            batch.windowed = batch.work(spec.kv_heads, threads, window);
        }
        batch
    }

    /// The attention of layers with a sliding window, or of those without.
    pub(super) fn attention(&self, has_window: bool) -> &Work {
        if has_window { &self.windowed } else { &self.full }
    }

    fn push_tiles(
        &mut self,
        span: usize,
        first_row: usize,
        of: &Span<'_>,
        most: usize,
        window: Option<usize>,
    ) {
        let mut start = 0;
        while start < of.tokens.len() {
            let position = of.first_position + start;
            let to_border = |key: usize| CHUNK_TOKENS - key % CHUNK_TOKENS;
            let streaming = apart(of, position);
            let whole = of.streaming.filter(|streaming| !streaming.is_apart(position));
            let to_apart = whole.map_or(usize::MAX, |whole| whole.cache_tokens() - position);
            let window = window_of(streaming, window);
            // Until the window is full, the first key stays where it is.
            let filling = window.map_or(0, |window| window.saturating_sub(position + 1));
            let count = most
                .min(to_border(position))
                .min(filling + to_border(first_key(position, window)))
                .min(to_apart)
                .min(of.tokens.len() - start);
            self.tiles.push(QueryTile {
                span,
                rows: first_row + start..first_row + start + count,
                position,
                streaming,
            });
            start += count;
        }
    }

    fn work(&self, kv_heads: usize, threads: usize, window: Option<usize>) -> Work {
        let whole = self.tiles.len() * kv_heads;
        let is_split = threads > 1
            && whole < UNITS_PER_THREAD * threads
            && self.tiles.iter().any(|tile| tile.chunks(window) > 1);
        let mut units = Vec::with_capacity(whole);
        for (index, tile) in self.tiles.iter().enumerate() {
            for head in 0..kv_heads {
                let chunks = 0..tile.chunks(window);
                if is_split {
                    units.extend(chunks.map(|chunk| Unit {
                        tile: index,
                        head,
                        chunks: chunk..chunk + 1,
                    }));
                } else {
                    units.push(Unit { tile: index, head, chunks });
                }
            }
        }
        if !is_split {
            units.sort_by_key(|unit| (std::cmp::Reverse(unit.chunks.len()), unit.head));
        }
        // From what the first sees to what the last sees.
        let keys = |first: &Row, last: &Row| {
            let sinks = first.streaming.map_or(0, |streaming| streaming.sinks as usize);
            let window = window_of(first.streaming, window);
            sinks + last.position + 1 - first_key(first.position, window)
        };
        let seen = |row: &Row| keys(row, row);
        let spans = self.rows.chunk_by(|a, b| a.span == b.span);
        let read = spans.map(|rows| keys(&rows[0], &rows[rows.len() - 1]));
        let (keys_seen, keys_read) = (self.rows.iter().map(seen).sum(), read.sum());
        Work { units, is_split, window, keys_seen, keys_read }
    }
}

/// What the token of `span` at `position` sees, once that is not all before it.
fn apart(span: &Span<'_>, position: usize) -> Option<StreamingAttention> {
    span.streaming.filter(|streaming| streaming.is_apart(position))
}

fn check_span(span: &Span<'_>, spec: &ModelSpec, pages: &Pages) {
    let end = span.first_position + span.tokens.len();
    let block_tokens = pages.layout().block_tokens as usize;
    let most = span.streaming.map_or(spec.context_tokens, |_| STREAMING_TOKENS_MAX);
    assert!(end <= most, "position {end} is past the model's context");
    assert!(end <= span.blocks.len() * block_tokens, "a span's blocks are too few");
    assert!(span.tokens.iter().all(|token| (*token as usize) < spec.vocab), "no such token");
    let unseen = span.streaming.map_or(0..0, |streaming| streaming.unseen(span.first_position));
    let unseen = unseen.start.div_ceil(block_tokens)..unseen.end / block_tokens;
    for (at, block) in span.blocks.iter().enumerate() {
        let is_missing = *block == BlockId::NONE && unseen.contains(&at);
        assert!(is_missing || (block.0 as usize) < pages.blocks(), "a block is not in the pool");
    }
    if let Some(streaming) = span.streaming {
        assert!(spec.features.window.is_none(), "layers have a window of their own");
        assert!(streaming.window > 0 && streaming.cache_tokens() <= spec.context_tokens);
    }
}
