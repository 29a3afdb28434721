//! Sinks seen by a query that is rotated anew, against keys that are: each to where it stands in
//! the cache.

use baton_types::{RopeScaling, RopeSpec, StreamingAttention};

use super::attention::Keys;
use super::{Random, kernels};
use crate::kernels::attention::{CHUNK_TOKENS, Partial};
use crate::kernels::dispatch::{Kernels, Merge, Rotate};
use crate::kernels::numerics::{bf16_round, bf16_widen};
use crate::kernels::rope::{Angles, RopeTable};

const THETA: f64 = 10_000.0;

/// One head: its keys and values by position, not rotated.
struct Head {
    dim: usize,
    table: RopeTable,
    query: Vec<f32>,
    positions: Vec<usize>,
    /// As the pages have them: rotated to the positions, then rounded.
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

fn rotated(kernels: &Kernels, angles: Angles<'_>, x: &[f32], scale: f32) -> Vec<f32> {
    let mut heads = x.to_vec();
    let mut job = Rotate { angles, heads: &mut heads, head_dim: x.len(), scale };
    // SAFETY: the instructions are available.
    unsafe { (kernels.rotate)(&mut job) };
    heads
}

/// In f64, by so many positions; back, where these are negative.
fn rotated_f64(x: &[f64], positions: f64) -> Vec<f64> {
    let half = x.len() / 2;
    let mut out = x.to_vec();
    for i in 0..half {
        let angle = positions / libm::pow(THETA, 2.0 * i as f64 / x.len() as f64);
        let (cos, sin) = (libm::cos(angle), libm::sin(angle));
        out[i] = x[i] * cos - x[i + half] * sin;
        out[i + half] = x[i] * sin + x[i + half] * cos;
    }
    out
}

fn widened(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

impl Head {
    /// Keys that the token at `position`, the last of them, sees.
    fn new(dim: usize, position: usize, seen: StreamingAttention, random: &mut Random) -> Self {
        let spec = RopeSpec { dim, theta: THETA, scaling: RopeScaling::None };
        let unseen = seen.unseen(position);
        let positions: Vec<usize> =
            (0..unseen.start.min(position + 1)).chain(unseen.end..=position).collect();
        let mut table = RopeTable::new(&spec, 1024);
        table.prepare(positions.clone().into_iter());
        let kernels = Kernels::plain_scalar();
        let round = |x: Vec<f32>| x.into_iter().map(|x| bf16_widen(bf16_round(x))).collect();
        let k = positions.iter().enumerate().map(|(row, &position)| {
            round(rotated(&kernels, table.angles(position, row), &random.numbers(dim), 1.0))
        });
        let k = k.collect();
        let v = positions.iter().map(|_| round(random.numbers(dim))).collect();
        Self { dim, query: random.numbers(dim), positions, k, v, table }
    }

    /// Attention with the keys rotated anew: `cache[i]` to place `i`, the query to the last.
    fn reference(&self) -> Vec<f64> {
        let last = self.positions.len() - 1;
        let query = rotated_f64(&widened(&self.query), last as f64);
        let score = |(place, k): (usize, &Vec<f32>)| -> f64 {
            let raw = rotated_f64(&widened(k), -(self.positions[place] as f64));
            let k = rotated_f64(&raw, place as f64);
            k.iter().zip(&query).map(|(k, q)| k * q).sum::<f64>() / libm::sqrt(self.dim as f64)
        };
        let scores: Vec<f64> = self.k.iter().enumerate().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| libm::exp(s - max)).collect();
        let sum: f64 = weights.iter().sum();
        let value = |d: usize| -> f64 {
            weights.iter().zip(&self.v).map(|(w, v)| w * f64::from(v[d])).sum::<f64>() / sum
        };
        (0..self.dim).map(value).collect()
    }

    /// As the backend does it: the keys as they lie, and two rotations of the query.
    fn computed(&self, kernels: &Kernels, seen: StreamingAttention) -> Vec<f32> {
        let scale = std::f32::consts::LOG2_E / (self.dim as f32).sqrt();
        let last = self.positions.len() - 1;
        let position = self.positions[last];
        let own = rotated(kernels, self.table.angles(position, last), &self.query, scale);
        let sinks = self.table.held_angles(seen.cache_tokens() - 1);
        let of_sinks = rotated(kernels, sinks, &self.query, scale);
        let mut state: Option<Partial> = None;
        let apart = seen.is_apart(position);
        let split = if apart { seen.sinks as usize } else { 0 };
        for (query, rows) in [(&of_sinks, 0..split), (&own, split..last + 1)] {
            for chunk in
                self.positions[rows.clone()].chunk_by(|a, b| a / CHUNK_TOKENS == b / CHUNK_TOKENS)
            {
                let part = self.attend(kernels, query, chunk);
                match &mut state {
                    None => state = Some(part),
                    Some(state) => {
                        let mut job = Merge { state, later: &part, rows: 1, dim: self.dim };
                        // SAFETY: the instructions are available.
                        unsafe { (kernels.merge)(&mut job) };
                    }
                }
            }
        }
        let state = state.unwrap();
        state.values.iter().map(|value| value / state.sum[0]).collect()
    }

    /// Over neighbours within one chunk of absolute positions; its other slots are NaN.
    fn attend(&self, kernels: &Kernels, query: &[f32], positions: &[usize]) -> Partial {
        let first = self.positions.iter().position(|at| *at == positions[0]).unwrap();
        let from = positions[0] % CHUNK_TOKENS;
        let mut k = vec![f32::NAN; CHUNK_TOKENS * self.dim];
        let mut v = k.clone();
        for i in 0..positions.len() {
            let slot = (from + i) * self.dim;
            k[slot..slot + self.dim].copy_from_slice(&self.k[first + i]);
            v[slot..slot + self.dim].copy_from_slice(&self.v[first + i]);
        }
        let keys = Keys::bf16(self.dim, k, v);
        keys.attend(kernels, query, &[from as u32], &[(from + positions.len()) as u32])
    }
}

#[test]
fn two_rotations_of_a_query_are_as_good_as_rotating_every_key() {
    let mut random = Random(91);
    let mut worst = 0.0f64;
    for (sinks, window) in [(4, 60), (4, 508), (0, 100), (300, 400)] {
        let seen = StreamingAttention { sinks, window };
        let full = seen.cache_tokens() - 1;
        for position in [5, full, full + 1, full + 2, 5_000, 70_123, 1_048_575] {
            for dim in [16, 64, 128] {
                let head = Head::new(dim, position, seen, &mut random);
                let want = head.reference();
                for kernels in kernels() {
                    let got = head.computed(&kernels, seen);
                    for (got, want) in got.iter().zip(&want) {
                        worst = worst.max((f64::from(*got) - want).abs());
                    }
                }
            }
        }
    }
    // f32 against f64; the farthest position is no worse than the nearest.
    assert!(worst < 2e-6, "off by {worst}");
}
