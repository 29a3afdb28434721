//! How K and V of 16 tokens lie in a tile, and how the attention kernel reads them.

use super::{CHUNK_TOKENS, Chunk, TILE_TOKENS};
use crate::kernels::numerics::{f16_round, f16_widen};
use crate::kernels::quantize::quantize_vector;
use crate::simd::{LANES, Lanes};

/// A format of tiles.
pub(crate) trait TileFormat {
    /// What is known of a query row beside its elements.
    type Query: Copy + Default;
    /// Of an element.
    const BITS: usize;

    /// Bytes of one tile of one head, K and V: a multiple of 64.
    fn tile_bytes(dim: usize) -> usize;

    /// Bytes from a tile's start, where K lies, to V.
    #[inline(always)]
    fn v_at(dim: usize) -> usize {
        TILE_TOKENS * dim * Self::BITS / 8
    }

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

/// Rows that leave the processor so little to do that it waits for memory.
pub(crate) const FEW_ROWS: usize = 8;

/// Asks, while few rows go over line `line` of K in tile `tile`, for what they want next: the same
/// line of V, and that of K `ahead` tiles on. Tiles lie in pages of their own, where the processor
/// foresees nothing.
#[inline(always)]
fn ask_ahead<L: Lanes, F: TileFormat, const R: usize>(
    l: L,
    chunk: &Chunk<'_>,
    tile: usize,
    ahead: usize,
    line: usize,
) {
    if R <= FEW_ROWS {
        l.prefetch(chunk.tiles[tile].wrapping_add(F::v_at(chunk.dim) + 64 * line));
        if let Some(tile) = chunk.tiles.get(tile + ahead) {
            l.prefetch(tile.wrapping_add(64 * line));
        }
    }
}

/// bfloat16: K `[dim / 2][token][2]`, two dimensions of a token in each 32-bit lane;
/// V `[token / 2][dim][2]`, two tokens in each lane.
#[derive(Clone, Copy)]
pub(crate) struct Bf16;

impl TileFormat for Bf16 {
    type Query = ();
    const BITS: usize = 16;

    #[inline(always)]
    fn tile_bytes(dim: usize) -> usize {
        2 * Self::v_at(dim)
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
                ask_ahead::<L, Self, R>(l, chunk, tile + t, T, pair);
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

/// Elements of `BITS` bits, unsigned in K: bytes plus 128, halves of bytes plus 8. Four bytes of a
/// token lie in each 32-bit lane. Then one f16 scale for each token, of K and of V.
///
/// Bytes: K `[dim / 4][token][4]`; V `[token][dim]`, signed. Halves: K `[dim / 8][token][4]`, low
/// halves the first four dimensions of eight; V `[token][dim / 16][8]`, low halves the first eight
/// of sixteen, plus 8.
#[derive(Clone, Copy)]
pub(crate) struct Quantized<const BITS: usize>;

pub(crate) type Int8 = Quantized<8>;
pub(crate) type Int4 = Quantized<4>;

/// What is added to K's bytes, so that they are unsigned.
pub(crate) const K_OFFSET: u8 = 128;
/// What is added to halves of bytes.
pub(crate) const NIBBLE_OFFSET: i32 = 8;

/// A query row as bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct ByteQuery {
    scale: f32,
    /// Where its dots start, which takes the offset of K out again.
    start: i32,
}

impl<const BITS: usize> Quantized<BITS> {
    /// Bytes from a tile's start to its scales.
    pub(crate) fn scales_at(dim: usize) -> usize {
        2 * TILE_TOKENS * dim * BITS / 8
    }
}

impl<const BITS: usize> TileFormat for Quantized<BITS> {
    type Query = ByteQuery;
    const BITS: usize = BITS;

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
        let offset = if BITS == 8 { L::BYTES_START } else { -NIBBLE_OFFSET };
        ByteQuery { scale, start: sum.wrapping_mul(offset) }
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
        // SAFETY: `attend` has checked that there are `rows * dim` bytes.
        let quad = |r: usize, at: usize| unsafe {
            quants.add(r * dim + 4 * at).cast::<i32>().read_unaligned()
        };
        for word in 0..dim * BITS / 32 {
            for t in 0..T {
                let keys = chunk.tiles[tile + t].cast::<[u8; 4 * LANES]>();
                // SAFETY: a tile holds so many groups of 64 bytes.
                let k = l.load_bytes(unsafe { &*keys.add(word) });
                ask_ahead::<L, Self, R>(l, chunk, tile + t, T, word);
                if BITS == 8 {
                    for r in 0..R {
                        acc[r][t] = l.dot_bytes(acc[r][t], k, quad(r, word));
                    }
                } else {
                    let (low, high) = (l.low_nibbles(k), l.high_nibbles(k));
                    for r in 0..R {
                        acc[r][t] = l.dot_small(acc[r][t], low, quad(r, 2 * word));
                        acc[r][t] = l.dot_small(acc[r][t], high, quad(r, 2 * word + 1));
                    }
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
        let row = dim * BITS / 8;
        let v = tile.wrapping_add((TILE_TOKENS + 2 * pair) * row + group * LANES * BITS / 8);
        if BITS == 8 {
            // SAFETY: V holds 16 tokens of `dim` bytes.
            let (even, odd) = unsafe { (&*v.cast(), &*v.wrapping_add(row).cast()) };
            return (l.to_float(l.load_signed(even)), l.to_float(l.load_signed(odd)));
        }
        // SAFETY: V holds 16 tokens of `dim / 2` bytes.
        let (even, odd) = unsafe { (&*v.cast(), &*v.wrapping_add(row).cast()) };
        let offset = l.splat(NIBBLE_OFFSET as f32);
        let number = |nibbles| l.sub(l.to_float(l.load_nibbles(nibbles)), offset);
        (number(even), number(odd))
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
    fn new(scale: f32) -> Self {
        let bits = f16_round(scale);
        let scale = f16_widen(bits);
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        Self { bits, inverse }
    }

    /// That of the bytes of `x[dim]`: `max|x| / 127`, rounded to half precision. NaN and infinity
    /// end in it, and show in every output.
    pub(crate) fn of_bytes(x: &[f32]) -> Self {
        Self::new(f32::from_bits(farthest(x).to_bits() & !SIGN) / 127.0)
    }

    /// That of the halves of bytes of `x[dim]`, which go from -8 to 7: what is farthest from zero,
    /// the first of equals, becomes -8, so that the scale has the other sign.
    pub(crate) fn of_nibbles(x: &[f32]) -> Self {
        Self::new(farthest(x) / -8.0)
    }

    /// `round(x * (1 / scale))`, ties to even, in -127..=127.
    #[inline(always)]
    pub(crate) fn byte(&self, x: f32) -> i8 {
        // A scale that was rounded down would lead beyond 127; NaN becomes 0.
        whole((x * self.inverse).clamp(-127.0, 127.0)) as i8
    }

    /// `round(x * (1 / scale)) + 8`, ties to even, in 0..=15.
    #[inline(always)]
    pub(crate) fn nibble(&self, x: f32) -> u8 {
        // NaN becomes 0.
        whole((x * self.inverse).clamp(-8.0, 7.0) + NIBBLE_OFFSET as f32) as u8
    }
}

const SIGN: u32 = 1 << 31;

/// The first of `x` whose absolute value is largest, NaN above all; 0 when there is none.
fn farthest(x: &[f32]) -> f32 {
    // Absolute values order as their bits do.
    let size = |x: f32| x.to_bits() & !SIGN;
    x.iter().fold(0.0, |far, x| if size(*x) > size(far) { *x } else { far })
}

/// The integer nearest to a small `x`, ties to even.
#[inline(always)]
fn whole(x: f32) -> f32 {
    const WHOLE: f32 = 12_582_912.0; // 1.5 * 2^23
    (x + WHOLE) - WHOLE
}
