//! What one step computes, row by row and tile by tile.

use std::ops::Range;

use baton_types::{BlockId, ModelSpec, TokenId};

use super::pages::Pages;
use crate::backend::{LogitRows, Span};
use crate::kernels::attention::CHUNK_TOKENS;

/// Query rows (tokens times heads of a group) that share the loads of K and V.
pub(super) const TILE_ROWS: usize = 12;

/// Attention is split by chunks of keys when there are fewer units than this for each thread.
const UNITS_PER_THREAD: usize = 4;

/// One token of the step.
pub(super) struct Row {
    pub(super) token: TokenId,
    pub(super) position: usize,
    pub(super) span: usize,
}

/// Consecutive tokens of one span whose last keys lie in the same chunk.
pub(super) struct QueryTile {
    pub(super) span: usize,
    /// Rows of the batch.
    pub(super) rows: Range<usize>,
    /// Position of the first.
    pub(super) position: usize,
    /// Chunks of keys that they see.
    pub(super) chunks: usize,
}

/// A piece of attention work: chunks of one tile and one KV head.
pub(super) struct Unit {
    pub(super) tile: usize,
    pub(super) head: usize,
    pub(super) chunks: Range<usize>,
}

/// One step.
pub(super) struct Batch<'a> {
    pub(super) rows: Vec<Row>,
    /// Pages of each span.
    pub(super) blocks: Vec<&'a [BlockId]>,
    pub(super) tiles: Vec<QueryTile>,
    /// Longest first, so that threads end together.
    pub(super) units: Vec<Unit>,
    /// Whether units are single chunks, whose results are merged afterwards.
    pub(super) is_split: bool,
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
            units: Vec::new(),
            is_split: false,
            logit_rows: Vec::new(),
        };
        let group = spec.heads / spec.kv_heads;
        for (index, span) in spans.iter().enumerate() {
            check_span(span, spec, pages);
            let first = batch.rows.len();
            batch.blocks.push(span.blocks);
            batch.rows.extend(span.tokens.iter().enumerate().map(|(i, token)| Row {
                token: *token,
                position: span.first_position + i,
                span: index,
            }));
            batch.push_tiles(index, first, span, (TILE_ROWS / group).max(1));
            let end = batch.rows.len();
            match span.logits {
                LogitRows::None => {}
                LogitRows::Last => batch.logit_rows.extend((first..end).next_back()),
                LogitRows::All => batch.logit_rows.extend(first..end),
            }
        }
        batch.split_units(spec.kv_heads, threads);
        batch
    }

    fn push_tiles(&mut self, span: usize, first_row: usize, of: &Span<'_>, most: usize) {
        let mut start = 0;
        while start < of.tokens.len() {
            let position = of.first_position + start;
            let to_border = CHUNK_TOKENS - position % CHUNK_TOKENS;
            let count = most.min(to_border).min(of.tokens.len() - start);
            self.tiles.push(QueryTile {
                span,
                rows: first_row + start..first_row + start + count,
                position,
                chunks: position / CHUNK_TOKENS + 1,
            });
            start += count;
        }
    }

    fn split_units(&mut self, kv_heads: usize, threads: usize) {
        let whole = self.tiles.len() * kv_heads;
        self.is_split = threads > 1
            && whole < UNITS_PER_THREAD * threads
            && self.tiles.iter().any(|tile| tile.chunks > 1);
        for (index, tile) in self.tiles.iter().enumerate() {
            for head in 0..kv_heads {
                if self.is_split {
                    self.units.extend((0..tile.chunks).map(|chunk| Unit {
                        tile: index,
                        head,
                        chunks: chunk..chunk + 1,
                    }));
                } else {
                    self.units.push(Unit { tile: index, head, chunks: 0..tile.chunks });
                }
            }
        }
        if !self.is_split {
            self.units.sort_by_key(|unit| std::cmp::Reverse(unit.chunks.end));
        }
    }
}

fn check_span(span: &Span<'_>, spec: &ModelSpec, pages: &Pages) {
    let end = span.first_position + span.tokens.len();
    let block_tokens = pages.layout().block_tokens as usize;
    assert!(end <= spec.context_tokens, "position {end} is past the model's context");
    assert!(end <= span.blocks.len() * block_tokens, "a span's blocks are too few");
    assert!(span.tokens.iter().all(|token| (*token as usize) < spec.vocab), "no such token");
    assert!(
        span.blocks.iter().all(|block| (block.0 as usize) < pages.blocks()),
        "a block is not in the pool"
    );
}
