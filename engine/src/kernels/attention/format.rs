//! How K and V of 16 tokens lie in a tile, and how the attention kernel reads them.

use super::{CHUNK_TOKENS, Chunk, TILE_TOKENS};
use crate::kernels::numerics::{f16_round, f16_widen};
use crate::kernels::quantize::quantize_vector;
use crate::simd::{LANES, Lanes};

/// A format of tiles.
pub(crate) trait TileFormat {
    /// What is known of a query row beside its elements.
    type Query: Copy + Default;

    /// Bytes of one tile of one head, K and V: a multiple of 64.
    fn tile_bytes(dim: usize) -> usize;

    /// Makes the chunk's query `row` ready for [`scores`](Self::scores).
    fn query<L: Lanes>(l: L, chunk: &mut Chunk<'_>, row: usize) -> Self::Query;

    /// `scores[row][token] = Σ_d q[row][d] * k[token][d]`, for `R` rows from `row` on, and for the
    /// tokens of `T` tiles from `tile` on.
    ///
    /// # Safety
    /// The tiles are readable, and `attend` has checked the chunk's sizes.
    unsafe fn scores<L: Lanes, const R: usize, const T: usize>(
        l: L,
        chunk: &mut Chunk<'_>,
        queries: &[Self::Query; R],
        row: usize,
        tile: usize,
    );

    /// What the numbers of [`pair`](Self::pair) are multiplied with, from the softmax's weights of
    /// the tile's 16 tokens.
    ///
    /// # Safety
    /// The tile is readable.
    unsafe fn weigh<L: Lanes>(l: L, tile: *const u8, dim: usize, weights: L::F) -> L::F;

    /// V of tokens `2 pair` and `2 pair + 1` of the tile, dimensions `16 group ..`.
    ///
    /// # Safety
    /// The tile is readable, `pair` below 8 and `group` below `dim / 16`.
    unsafe fn pair<L: Lanes>(
        l: L,
        tile: *const u8,
        dim: usize,
        pair: usize,
        group: usize,
    ) -> (L::F, L::F);
}

/// bfloat16: K `[dim / 2][token][2]`, two dimensions of a token in each 32-bit lane;
/// V `[token / 2][dim][2]`, two tokens in each lane.
#[derive(Clone, Copy)]
pub(crate) struct Bf16;

impl TileFormat for Bf16 {
    type Query = ();

    #[inline(always)]
    fn tile_bytes(dim: usize) -> usize {
        2 * 2 * TILE_TOKENS * dim
    }

    #[inline(always)]
    fn query<L: Lanes>(_l: L, _chunk: &mut Chunk<'_>, _row: usize) {}

    /// One chain of fused operations in ascending `d`.
    #[inline(always)]
    unsafe fn scores<L: Lanes, const R: usize, const T: usize>(
        l: L,
        chunk: &mut Chunk<'_>,
        _queries: &[(); R],
        row: usize,
        tile: usize,
    ) {
        let dim = chunk.dim;
        let mut acc = [[l.splat(0.0); T]; R];
        let mut keys = [std::ptr::null::<[u32; LANES]>(); T];
        for t in 0..T {
            keys[t] = chunk.tiles[tile + t].cast();
        }
        let queries = chunk.queries.as_ptr().wrapping_add(row * dim);
        for pair in 0..dim / 2 {
            for t in 0..T {
                // SAFETY: a tile holds `dim / 2` groups of 16 words, aligned to 64 bytes.
                let k = l.load_i(unsafe { &*keys[t].add(pair) });
                let (even, odd) = (l.low_bf16(k), l.high_bf16(k));
                for r in 0..R {
                    // SAFETY: `attend` has checked that the queries hold `rows * dim` numbers.
                    let q = unsafe { queries.add(r * dim + 2 * pair) };
                    // SAFETY: as above.
                    let (q0, q1) = unsafe { (*q, *q.add(1)) };
                    acc[r][t] = l.fma(even, l.splat(q0), acc[r][t]);
                    acc[r][t] = l.fma(odd, l.splat(q1), acc[r][t]);
                }
            }
        }
        for r in 0..R {
            let out = &mut chunk.scores[(row + r) * CHUNK_TOKENS + tile * TILE_TOKENS..];
            for t in 0..T {
                l.store(acc[r][t], &mut out.as_chunks_mut::<LANES>().0[t]);
            }
        }
    }

    #[inline(always)]
    unsafe fn weigh<L: Lanes>(_l: L, _tile: *const u8, _dim: usize, weights: L::F) -> L::F {
        weights
    }

    #[inline(always)]
    unsafe fn pair<L: Lanes>(
        l: L,
        tile: *const u8,
        dim: usize,
        pair: usize,
        group: usize,
    ) -> (L::F, L::F) {
        let v = tile.cast::<u32>().wrapping_add(dim / 2 * TILE_TOKENS + pair * dim + group * LANES);
        // SAFETY: V holds 8 token pairs of `dim` words, aligned to 64 bytes.
        let both = l.load_i(unsafe { &*v.cast() });
        (l.low_bf16(both), l.high_bf16(both))
    }
}

/// Bytes: K `[dim / 4][token][4]`, plus 128, four dimensions of a token in each 32-bit lane;
/// V `[token][dim]`, signed; then one f16 scale for each token, of K and of V.
#[derive(Clone, Copy)]
pub(crate) struct Int8;

/// What is added to K's bytes, so that they are unsigned.
pub(crate) const K_OFFSET: u8 = 128;

/// A query row as bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct ByteQuery {
    scale: f32,
    /// Where its dots start, which takes `K_OFFSET` out again.
    start: i32,
}

impl Int8 {
    /// Bytes from a tile's start to its scales.
    fn scales_at(dim: usize) -> usize {
        2 * TILE_TOKENS * dim
    }
}

impl TileFormat for Int8 {
    type Query = ByteQuery;

    #[inline(always)]
    fn tile_bytes(dim: usize) -> usize {
        Self::scales_at(dim) + 2 * 2 * TILE_TOKENS
    }

    /// One scale for the row: `q = round(x * 127 / max|x|)`.
    #[inline(always)]
    fn query<L: Lanes>(l: L, chunk: &mut Chunk<'_>, row: usize) -> ByteQuery {
        let elements = row * chunk.dim..(row + 1) * chunk.dim;
        let (scale, sum) =
            quantize_vector(l, &chunk.queries[elements.clone()], &mut chunk.quants[elements]);
        ByteQuery { scale, start: sum.wrapping_mul(L::BYTES_START) }
    }

    /// An exact integer dot, as a number times (K's scale times the query's).
    #[inline(always)]
    unsafe fn scores<L: Lanes, const R: usize, const T: usize>(
        l: L,
        chunk: &mut Chunk<'_>,
        queries: &[ByteQuery; R],
        row: usize,
        tile: usize,
    ) {
        let dim = chunk.dim;
        let mut acc = [[l.splat_i(0); T]; R];
        for r in 0..R {
            acc[r] = [l.splat_i(queries[r].start); T];
        }
        let quants = chunk.quants.as_ptr().wrapping_add(row * dim);
        for quad in 0..dim / 4 {
            for t in 0..T {
                let keys = chunk.tiles[tile + t].cast::<[u8; 4 * LANES]>();
                // SAFETY: a tile holds `dim / 4` groups of 64 bytes.
                let k = l.load_bytes(unsafe { &*keys.add(quad) });
                for r in 0..R {
                    // SAFETY: `attend` has checked that there are `rows * dim` bytes.
                    let q = unsafe { quants.add(r * dim + 4 * quad).cast::<i32>() };
                    // SAFETY: as above.
                    acc[r][t] = l.dot_bytes(acc[r][t], k, unsafe { q.read_unaligned() });
                }
            }
        }
        for t in 0..T {
            let scales = chunk.tiles[tile + t].wrapping_add(Self::scales_at(dim));
            // SAFETY: the scales of K lie there, in the tile.
            let scales = l.load_f16(unsafe { &*scales.cast() });
            for r in 0..R {
                let scale = l.mul(scales, l.splat(queries[r].scale));
                let out = &mut chunk.scores[(row + r) * CHUNK_TOKENS + tile * TILE_TOKENS..];
                let out = &mut out.as_chunks_mut::<LANES>().0[t];
                l.store(l.mul(l.to_float(acc[r][t]), scale), out);
            }
        }
    }

    #[inline(always)]
    unsafe fn weigh<L: Lanes>(l: L, tile: *const u8, dim: usize, weights: L::F) -> L::F {
        let scales = tile.wrapping_add(Self::scales_at(dim) + 2 * TILE_TOKENS);
        // SAFETY: the scales of V lie there, in the tile.
        l.mul(weights, l.load_f16(unsafe { &*scales.cast() }))
    }

    #[inline(always)]
    unsafe fn pair<L: Lanes>(
        l: L,
        tile: *const u8,
        dim: usize,
        pair: usize,
        group: usize,
    ) -> (L::F, L::F) {
        let v = tile.wrapping_add((TILE_TOKENS + 2 * pair) * dim + group * LANES);
        // SAFETY: V holds 16 tokens of `dim` bytes.
        let (even, odd) = unsafe { (&*v.cast(), &*v.wrapping_add(dim).cast()) };
        (l.to_float(l.load_signed(even)), l.to_float(l.load_signed(odd)))
    }
}

/// The scale of K or V of one token and one head, as it is stored.
#[derive(Clone, Copy)]
pub(crate) struct StoredScale {
    /// Half precision.
    pub(crate) bits: u16,
    inverse: f32,
}

impl StoredScale {
    /// That of `x[dim]`: `max|x| / 127`, rounded to half precision. NaN and infinity end in it,
    /// and show in every output.
    pub(crate) fn of(x: &[f32]) -> Self {
        // Absolute values order as their bits do, NaN above all.
        let max = x.iter().fold(0, |max, x| (x.to_bits() & 0x7fff_ffff).max(max));
        let bits = f16_round(f32::from_bits(max) / 127.0);
        let scale = f16_widen(bits);
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        Self { bits, inverse }
    }

    /// `round(x * (1 / scale))`, ties to even, in -127..=127.
    #[inline(always)]
    pub(crate) fn byte(&self, x: f32) -> i8 {
        /// 1.5 * 2^23 leaves the integer nearest to a small x, ties to even.
        const WHOLE: f32 = 12_582_912.0;
        // A scale that was rounded down would lead beyond 127; NaN becomes 0.
        let scaled = (x * self.inverse).clamp(-127.0, 127.0);
        ((scaled + WHOLE) - WHOLE) as i8
    }
}
