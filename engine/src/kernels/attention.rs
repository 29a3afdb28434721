//! Attention of a few query rows over one chunk of keys, and the merge of chunks.
//!
//! A chunk is 256 keys at absolute positions `256 c ..`; each gives a maximum, a sum of weights
//! and weighted values, in an order that depends on positions alone, and chunks are merged in
//! ascending order (the streaming softmax of Milakov and Gimelshein, 2018, at fixed borders). So
//! a row's result is the same whoever computes it, in however many steps.
//!
//! Keys and values lie in tiles of 16 tokens (`cpu::pages`), in one of the formats of `format`.

pub(crate) mod format;

use std::ops::Range;

use format::{FEW_ROWS, TileFormat};

use super::numerics::{exp2, exp2_lanes};
use crate::simd::{LANES, Lanes};

/// Keys of a chunk.
pub(crate) const CHUNK_TOKENS: usize = 256;
/// Tokens of a tile.
pub(crate) const TILE_TOKENS: usize = LANES;
/// Tiles of a chunk.
pub(crate) const CHUNK_TILES: usize = CHUNK_TOKENS / TILE_TOKENS;

/// The attention of `rows` query rows over some keys, not yet divided by the sum.
#[derive(Clone, Debug, Default)]
pub(crate) struct Partial {
    pub(crate) max: Vec<f32>,
    pub(crate) sum: Vec<f32>,
    /// `[row][dim]`
    pub(crate) values: Vec<f32>,
}

impl Partial {
    pub(crate) fn new(rows: usize, dim: usize) -> Self {
        Self { max: vec![0.0; rows], sum: vec![0.0; rows], values: vec![0.0; rows * dim] }
    }
}

/// One chunk for one KV head.
pub(crate) struct Chunk<'a> {
    pub(crate) dim: usize,
    /// `[row][dim]`, rotated, times `log2(e) / sqrt(dim)`.
    pub(crate) queries: &'a [f32],
    /// The keys of the chunk that each row sees, at least one: from the first ...
    pub(crate) from: &'a [u32],
    /// ... to before this one, at most 256.
    pub(crate) visible: &'a [u32],
    /// The chunk's tiles, each of [`TileFormat::tile_bytes`], aligned to 64; past the last visible
    /// key repeated.
    pub(crate) tiles: [*const u8; CHUNK_TILES],
    /// The tiles whose keys are wanted next; only a hint, for they are never read.
    pub(crate) next: [*const u8; CHUNK_TILES],
    /// Room for `[row][dim]`: the queries, where the format wants them as bytes.
    pub(crate) quants: &'a mut [i8],
    /// Room for `[row][256]`.
    pub(crate) scores: &'a mut [f32],
    pub(crate) out: &'a mut Partial,
}

/// Computes all rows of a chunk whose tiles are of format `F`.
///
/// # Safety
/// Tiles up to each row's last visible key are readable and nobody writes the visible tokens;
/// what lies in slots that no row sees is never used.
#[inline(always)]
pub(crate) unsafe fn attend<L: Lanes, F: TileFormat>(l: L, chunk: &mut Chunk<'_>) {
    let rows = chunk.visible.len();
    let dim = chunk.dim;
    assert!(chunk.from.len() == rows);
    assert!(dim.is_multiple_of(LANES) && chunk.queries.len() >= rows * dim);
    assert!(chunk.scores.len() >= rows * CHUNK_TOKENS && chunk.out.values.len() >= rows * dim);
    assert!(chunk.quants.len() >= rows * dim);
    let mut first = 0;
    // As many sums as there are registers beside one tile's keys, and no more: what spills costs
    // more than a key that is loaded again.
    // SAFETY: rows are in bounds; the tiles are the caller's promise.
    unsafe {
        while first < rows {
            let span = |count: usize| first..first + count;
            first += match rows - first {
                24.. if L::MANY_REGISTERS => rows_of::<L, F, 24, 1, 1>(l, chunk, span(24)),
                12.. if L::MANY_REGISTERS => rows_of::<L, F, 12, 1, 1>(l, chunk, span(12)),
                8.. if L::MANY_REGISTERS => rows_of::<L, F, 8, 2, 2>(l, chunk, span(8)),
                6.. if L::MANY_REGISTERS => rows_of::<L, F, 6, 2, 2>(l, chunk, span(6)),
                6.. => rows_of::<L, F, 6, 1, 1>(l, chunk, span(6)),
                4.. => rows_of::<L, F, 4, 4, 4>(l, chunk, span(4)),
                3 => rows_of::<L, F, 3, 4, 4>(l, chunk, span(3)),
                2 => rows_of::<L, F, 2, 4, 4>(l, chunk, span(2)),
                _ => rows_of::<L, F, 1, 8, 4>(l, chunk, span(1)),
            };
        }
    }
}

/// Which tokens of a chunk several rows see.
struct Seen {
    /// Some row sees each of these, or one between them.
    any: Range<usize>,
    /// All rows see each of these, even at both ends; it may be empty.
    all: Range<usize>,
}

impl Seen {
    #[inline(always)]
    fn new(from: &[u32], visible: &[u32]) -> Self {
        let none = Range { start: CHUNK_TOKENS, end: 0 };
        let mut seen = Self { any: none, all: 0..CHUNK_TOKENS };
        for (&from, &visible) in from.iter().zip(visible) {
            assert!(from < visible && visible as usize <= CHUNK_TOKENS);
            seen.any.start = seen.any.start.min(from as usize);
            seen.any.end = seen.any.end.max(visible as usize);
            seen.all.start = seen.all.start.max(from as usize);
            seen.all.end = seen.all.end.min(visible as usize);
        }
        seen.all.start = seen.all.start.next_multiple_of(2);
        seen.all.end = (seen.all.end / 2 * 2).max(seen.all.start);
        seen
    }
}

/// `R` rows; scores over `T` tiles at once, values over `D` groups of 16 dimensions at once.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn rows_of<L: Lanes, F: TileFormat, const R: usize, const T: usize, const D: usize>(
    l: L,
    chunk: &mut Chunk<'_>,
    rows: Range<usize>,
) -> usize {
    let seen = Seen::new(&chunk.from[rows.clone()], &chunk.visible[rows.clone()]);
    let mut queries = [F::Query::default(); R];
    for r in 0..R {
        queries[r] = F::query(l, chunk, rows.start + r);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let first_tile = seen.any.start / TILE_TOKENS / T * T;
        for tile in (first_tile..seen.any.end.div_ceil(TILE_TOKENS)).step_by(T) {
            F::scores::<L, R, T>(l, chunk, &queries, rows.start, tile);
        }
        for row in rows.clone() {
            softmax::<L, F>(l, chunk, row);
        }
        // Pairs of tokens that all rows see; each row does alone what it sees before and beyond.
        if seen.all.start > 0 {
            for row in rows.clone() {
                chunk.out.values[row * chunk.dim..][..chunk.dim].fill(0.0);
                let end = seen.all.start.min(chunk.visible[row] as usize);
                values_of::<L, F>(l, chunk, row, chunk.from[row] as usize..end);
            }
        }
        let groups = chunk.dim / LANES;
        let mut group = 0;
        while group + D <= groups {
            values::<L, F, R, D>(l, chunk, rows.start, group, seen.all.clone());
            group += D;
        }
        while group < groups {
            values::<L, F, R, 1>(l, chunk, rows.start, group, seen.all.clone());
            group += 1;
        }
        for row in rows.clone() {
            values_of::<L, F>(l, chunk, row, seen.all.end..chunk.visible[row] as usize);
        }
    }
    R
}

/// Turns a row's scores into weights `2^(score - max)`, and sums them: lane by lane over the
/// tiles, then in the tree of `reduce_add`. Slots that the row does not see count for nothing.
/// What stays is what V's numbers are multiplied with: the weight, times V's scale if it has one.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn softmax<L: Lanes, F: TileFormat>(l: L, chunk: &mut Chunk<'_>, row: usize) {
    let (from, visible) = (chunk.from[row] as usize, chunk.visible[row] as usize);
    // SAFETY: the caller's promise.
    unsafe {
        if from.is_multiple_of(LANES) && visible.is_multiple_of(LANES) {
            softmax_over::<L, F, true>(l, chunk, row, from, visible);
        } else {
            softmax_over::<L, F, false>(l, chunk, row, from, visible);
        }
    }
}

/// [`softmax`] over keys `from..visible`. `WHOLE`: the row sees all or nothing of every tile.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn softmax_over<L: Lanes, F: TileFormat, const WHOLE: bool>(
    l: L,
    chunk: &mut Chunk<'_>,
    row: usize,
    from: usize,
    visible: usize,
) {
    let scores = &mut chunk.scores[row * CHUNK_TOKENS..][..CHUNK_TOKENS];
    let first_tile = from / LANES;
    let tiles = &mut scores.as_chunks_mut::<LANES>().0[first_tile..visible.div_ceil(LANES)];
    // From here on both count from the first of these tiles.
    let (from, visible) = (from % LANES, visible - first_tile * LANES);
    // What the row sees of tile `t`, and `other` in the other slots.
    let seen = |t: usize, x: L::F, other: L::F| {
        if WHOLE {
            return x;
        }
        let x = l.keep_first(visible - t * LANES, x, other);
        if t == 0 { l.keep_first(from, other, x) } else { x }
    };
    let mut max = l.splat(f32::NEG_INFINITY);
    for (t, tile) in tiles.iter().enumerate() {
        max = l.max(max, seen(t, l.load(tile), l.splat(f32::NEG_INFINITY)));
    }
    let max = l.reduce_max(max);
    let mut sum = l.splat(0.0);
    for (t, tile) in tiles.iter_mut().enumerate() {
        let weight = exp2_lanes(l, l.sub(l.load(tile), l.splat(max)));
        let weight = seen(t, weight, l.splat(0.0));
        sum = l.add(sum, weight);
        // SAFETY: this tile has a token that the row sees.
        l.store(unsafe { F::weigh(l, chunk.tiles[first_tile + t], chunk.dim, weight) }, tile);
    }
    chunk.out.max[row] = max;
    chunk.out.sum[row] = l.reduce_add(sum);
}

/// `values[row][d] = Σ_t weight[row][t] * v[t][d]` for `t` in `tokens`, one chain in ascending
/// `t`; it continues what is there unless it begins with the chunk.
///
/// # Safety
/// As [`attend`], for rows `row..row + R`, all of which see `tokens`, even at both ends.
#[inline(always)]
unsafe fn values<L: Lanes, F: TileFormat, const R: usize, const D: usize>(
    l: L,
    chunk: &mut Chunk<'_>,
    row: usize,
    group: usize,
    tokens: Range<usize>,
) {
    let dim = chunk.dim;
    let groups = dim / LANES;
    let mut acc = [[l.splat(0.0); D]; R];
    if tokens.start > 0 {
        for r in 0..R {
            let out = &chunk.out.values[(row + r) * dim + group * LANES..];
            for d in 0..D {
                acc[r][d] = l.load(&out.as_chunks::<LANES>().0[d]);
            }
        }
    }
    let weights = chunk.scores.as_ptr().wrapping_add(row * CHUNK_TOKENS);
    for t in tokens.start / TILE_TOKENS..tokens.end.div_ceil(TILE_TOKENS) {
        let first = tokens.start.saturating_sub(t * TILE_TOKENS) / 2;
        let end = (tokens.end - t * TILE_TOKENS).min(TILE_TOKENS) / 2;
        for pair in first..end {
            let mut w = [(0.0, 0.0); R];
            for r in 0..R {
                let at = r * CHUNK_TOKENS + t * TILE_TOKENS + 2 * pair;
                // SAFETY: `attend` has checked that there is room for `rows * 256` weights.
                w[r] = unsafe { (*weights.add(at), *weights.add(at + 1)) };
            }
            for d in 0..D {
                if R <= FEW_ROWS {
                    // As much of the next keys as is read here of values: two tokens of 16.
                    let at = (pair * groups + group + d) * 2 * LANES * F::BITS / 8;
                    l.prefetch(chunk.next[t].wrapping_add(at));
                }
                // SAFETY: the pair lies in the tile, and so do `dim / 16` groups.
                let (even, odd) = unsafe { F::pair(l, chunk.tiles[t], dim, pair, group + d) };
                for r in 0..R {
                    acc[r][d] = l.fma(even, l.splat(w[r].0), acc[r][d]);
                    acc[r][d] = l.fma(odd, l.splat(w[r].1), acc[r][d]);
                }
            }
        }
    }
    for r in 0..R {
        let out = &mut chunk.out.values[(row + r) * dim + group * LANES..];
        for d in 0..D {
            l.store(acc[r][d], &mut out.as_chunks_mut::<LANES>().0[d]);
        }
    }
}

/// Continues `values` of one row over `tokens`.
///
/// # Safety
/// As [`attend`]; the row sees `tokens`.
#[inline(always)]
unsafe fn values_of<L: Lanes, F: TileFormat>(
    l: L,
    chunk: &mut Chunk<'_>,
    row: usize,
    tokens: Range<usize>,
) {
    let dim = chunk.dim;
    let out = chunk.out.values[row * dim..][..dim].as_chunks_mut::<LANES>().0;
    let weights = &chunk.scores[row * CHUNK_TOKENS..][..CHUNK_TOKENS];
    for (d, out) in out.iter_mut().enumerate() {
        let mut acc = l.load(out);
        for token in tokens.clone() {
            let (tile, pair) = (chunk.tiles[token / TILE_TOKENS], token % TILE_TOKENS / 2);
            // SAFETY: as in `values`; of the pair only the visible token is used.
            let (even, odd) = unsafe { F::pair(l, tile, dim, pair, d) };
            let v = if token % 2 == 0 { even } else { odd };
            acc = l.fma(v, l.splat(weights[token]), acc);
        }
        l.store(acc, out);
    }
}

/// Merges the attention over later keys into `state`, for the first `rows` rows.
#[inline(always)]
pub(crate) fn merge<L: Lanes>(l: L, state: &mut Partial, later: &Partial, rows: usize, dim: usize) {
    for row in 0..rows {
        let (a, b) = (state.max[row], later.max[row]);
        let max = if a > b { a } else { b };
        let (scale_a, scale_b) = (exp2(a - max), exp2(b - max));
        state.max[row] = max;
        state.sum[row] = later.sum[row].mul_add(scale_b, state.sum[row] * scale_a);
        let (scale_a, scale_b) = (l.splat(scale_a), l.splat(scale_b));
        let values = state.values[row * dim..][..dim].as_chunks_mut::<LANES>().0;
        let later = later.values[row * dim..][..dim].as_chunks::<LANES>().0;
        for (x, later) in values.iter_mut().zip(later) {
            l.store(l.fma(l.load(later), scale_b, l.mul(l.load(x), scale_a)), x);
        }
    }
}
