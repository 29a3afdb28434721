//! One chunk of keys, with poison in every slot that nobody may see.

use std::ops::Range;

use baton_types::KvDtype;

use super::{Random, bits, kernels};
use crate::kernels::attention::{CHUNK_TILES, CHUNK_TOKENS, Chunk, Partial, TILE_TOKENS};
use crate::kernels::dispatch::{Kernels, Merge};
use crate::kernels::numerics::{bf16_round, bf16_widen, f16_round, f16_widen};

/// K and V of 256 tokens in tiles, and as numbers.
pub(super) struct Keys {
    dim: usize,
    dtype: KvDtype,
    tiles: Vec<Vec<[u32; 16]>>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Keys {
    /// The tokens `filled` are random, the others NaN.
    fn new(dim: usize, filled: Range<usize>, random: &mut Random) -> Self {
        let mut number = |i: usize| {
            let x = if filled.contains(&(i / dim)) { random.number() } else { f32::NAN };
            bf16_widen(bf16_round(x))
        };
        let k: Vec<f32> = (0..CHUNK_TOKENS * dim).map(&mut number).collect();
        let v: Vec<f32> = (0..CHUNK_TOKENS * dim).map(&mut number).collect();
        Self::bf16(dim, k, v)
    }

    /// Of numbers that are bfloat16.
    pub(super) fn bf16(dim: usize, k: Vec<f32>, v: Vec<f32>) -> Self {
        let word = |low: f32, high: f32| u32::from(bf16_round(low)) | (high.to_bits() & !0xffff);
        let tile = |t: usize| {
            let mut words = Vec::new();
            for pair in 0..dim / 2 {
                for token in t * TILE_TOKENS..(t + 1) * TILE_TOKENS {
                    words.push(word(k[token * dim + 2 * pair], k[token * dim + 2 * pair + 1]));
                }
            }
            for pair in 0..TILE_TOKENS / 2 {
                let token = t * TILE_TOKENS + 2 * pair;
                for d in 0..dim {
                    words.push(word(v[token * dim + d], v[(token + 1) * dim + d]));
                }
            }
            words.as_chunks().0.to_vec()
        };
        let tiles = (0..CHUNK_TILES).map(tile).collect();
        Self { dim, dtype: KvDtype::Bf16, tiles, k, v }
    }

    /// The same as bytes or halves of bytes: of tokens that are not `filled` the scales are NaN.
    fn quantized(dtype: KvDtype, dim: usize, filled: Range<usize>, random: &mut Random) -> Self {
        let mut keys = Self { dim, dtype, tiles: Vec::new(), k: Vec::new(), v: Vec::new() };
        let (row, is_int8) = (dtype.elements_bytes(dim), dtype == KvDtype::Int8);
        for tile in 0..CHUNK_TILES {
            let mut bytes = vec![0u8; 32 * row + 64];
            for (token, half) in (0..TILE_TOKENS).flat_map(|token| [(token, 0), (token, 1)]) {
                let is_filled = filled.contains(&(tile * TILE_TOKENS + token));
                let size = if is_int8 { 0.008 } else { 0.12 };
                let scale = if is_filled { size * random.number() } else { f32::NAN };
                let scale = f16_round(scale);
                let at = 32 * row + 32 * half + 2 * token;
                bytes[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                for d in 0..dim {
                    let q = if is_int8 {
                        random.below(255) as i32 - 127
                    } else {
                        random.below(16) as i32 - 8
                    };
                    match (half, is_int8) {
                        (0, true) => bytes[d / 4 * 64 + token * 4 + d % 4] = (q + 128) as u8,
                        (_, true) => bytes[16 * dim + token * dim + d] = q as u8,
                        (0, false) => {
                            let byte = &mut bytes[d / 8 * 64 + token * 4 + d % 4];
                            *byte |= ((q + 8) as u8) << (d % 8 / 4 * 4);
                        }
                        (_, false) => {
                            let byte = &mut bytes[(16 + token) * row + d / 16 * 8 + d % 8];
                            *byte |= ((q + 8) as u8) << (d % 16 / 8 * 4);
                        }
                    }
                    let numbers = if half == 0 { &mut keys.k } else { &mut keys.v };
                    numbers.push(q as f32 * f16_widen(scale));
                }
            }
            let words: Vec<u32> =
                bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            keys.tiles.push(words.as_chunks().0.to_vec());
        }
        keys
    }

    /// A query as the kernel reads it.
    fn rounded(&self, query: &[f32]) -> Vec<f32> {
        if self.dtype == KvDtype::Bf16 {
            return query.to_vec();
        }
        let max = query.iter().fold(0.0, |max: f32, q| max.max(q.abs()));
        query.iter().map(|q| (q * (127.0 / max)).round_ties_even() * (max / 127.0)).collect()
    }

    pub(super) fn attend(
        &self,
        kernels: &Kernels,
        queries: &[f32],
        from: &[u32],
        visible: &[u32],
    ) -> Partial {
        let rows = visible.len();
        let mut out = Partial::new(rows, self.dim);
        let mut scores = vec![f32::NAN; rows * CHUNK_TOKENS];
        let mut chunk = Chunk {
            dim: self.dim,
            queries,
            from,
            visible,
            tiles: std::array::from_fn(|t| self.tiles[t].as_ptr().cast()),
            next: [std::ptr::null(); CHUNK_TILES],
            quants: &mut vec![0; rows * self.dim],
            scores: &mut scores,
            out: &mut out,
        };
        let attend = match self.dtype {
            KvDtype::Int8 => kernels.attend_int8,
            KvDtype::Int4 => kernels.attend_int4,
            _ => kernels.attend_bf16,
        };
        // SAFETY: the tiles are whole, and there is one thread.
        unsafe { attend(&mut chunk) };
        out
    }

    /// `(max, sum, values)` in f64.
    fn reference(&self, query: &[f32], visible: Range<usize>) -> (f64, f64, Vec<f64>) {
        let query = self.rounded(query);
        let dot = |t: usize| -> f64 {
            let k = &self.k[t * self.dim..][..self.dim];
            k.iter().zip(&query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
        };
        let scores: Vec<f64> = visible.clone().map(dot).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| libm::exp2(s - max)).collect();
        let value = |d: usize| -> f64 {
            let values = visible.clone().map(|t| f64::from(self.v[t * self.dim + d]));
            weights.iter().zip(values).map(|(w, v)| w * v).sum()
        };
        (max, weights.iter().sum(), (0..self.dim).map(value).collect())
    }
}

#[test]
fn all_agree_and_are_close_to_f64() {
    let mut random = Random(77);
    for dim in [16, 48, 64, 80, 128] {
        for rows in [1, 2, 3, 4, 5, 6, 8, 9, 12, 14, 24, 27] {
            let most = 1 + random.below(CHUNK_TOKENS);
            let visible: Vec<u32> =
                (0..rows).map(|_| most.saturating_sub(random.below(5)).max(1) as u32).collect();
            // Without a window, and with one that begins anywhere and may be narrow.
            let least = *visible.iter().min().unwrap() as usize;
            for first in [0, random.below(least), least - 1] {
                let from: Vec<u32> = (visible.iter())
                    .map(|end| (first + first.min(random.below(7))).min(*end as usize - 1) as u32)
                    .collect();
                let queries: Vec<f32> =
                    random.numbers(rows * dim).iter().map(|q| q * 0.3).collect();
                for keys in [
                    Keys::new(dim, first..most, &mut random),
                    Keys::quantized(KvDtype::Int8, dim, first..most, &mut random),
                    Keys::quantized(KvDtype::Int4, dim, first..most, &mut random),
                ] {
                    agree(&keys, &queries, &from, &visible);
                }
            }
        }
    }
}

fn agree(keys: &Keys, queries: &[f32], from: &[u32], visible: &[u32]) {
    let dim = keys.dim;
    let want = keys.attend(&kernels().next().unwrap(), queries, from, visible);
    for (row, query) in queries.chunks_exact(dim).enumerate() {
        let seen = from[row] as usize..visible[row] as usize;
        let (max, sum, values) = keys.reference(query, seen);
        assert!((f64::from(want.max[row]) - max).abs() < 1e-4);
        assert!((f64::from(want.sum[row]) / sum - 1.0).abs() < 1e-4);
        for (got, want) in want.values[row * dim..].iter().zip(values) {
            assert!((f64::from(*got) - want).abs() < 1e-3 * sum, "{got} {want}");
        }
    }
    for kernels in kernels() {
        let got = keys.attend(&kernels, queries, from, visible);
        assert_eq!(bits(&got.values), bits(&want.values), "{dim} {}", visible.len());
        assert_eq!(bits(&got.sum), bits(&want.sum));
        assert_eq!(bits(&got.max), bits(&want.max));
        for (row, query) in queries.chunks_exact(dim).enumerate() {
            let alone = keys.attend(&kernels, query, &from[row..=row], &visible[row..=row]);
            assert_eq!(bits(&alone.values), bits(&want.values[row * dim..][..dim]));
        }
    }
}

#[test]
fn merging_agrees_and_is_right() {
    let mut random = Random(78);
    let dim = 32;
    let mut partial = |max: f32| Partial {
        max: vec![max; 2],
        sum: vec![2.0; 2],
        values: random.numbers(2 * dim),
    };
    let (first, later) = (partial(3.0), partial(5.0));
    let mut results = Vec::new();
    for kernels in kernels() {
        let mut state = first.clone();
        let mut job = Merge { state: &mut state, later: &later, rows: 2, dim };
        // SAFETY: the instructions are available.
        unsafe { (kernels.merge)(&mut job) };
        assert_eq!((state.max[0], state.sum[0]), (5.0, 2.5));
        for i in 0..2 * dim {
            assert!((state.values[i] - (first.values[i] * 0.25 + later.values[i])).abs() < 1e-6);
        }
        results.push(bits(&state.values));
    }
    assert!(results.iter().all(|r| *r == results[0]));
}
