//! Rotary position embedding (Su et al., "RoFormer", 2021), halves against one another.

use baton_model_files::llama3_factor;
use baton_types::{ModelSpec, RopeScaling, RopeSpec};

use super::numerics;

/// Cosines and sines of every position and dimension pair.
pub(crate) struct RopeTable {
    half: usize,
    /// `[position][cos of half pairs, sin of half pairs]`
    values: Vec<f32>,
}

impl RopeTable {
    /// Computed in f64 and rounded once.
    pub(crate) fn new(spec: &RopeSpec, positions: usize) -> Self {
        let half = spec.dim / 2;
        let frequencies: Vec<f64> = (0..half).map(|pair| frequency(spec, pair)).collect();
        let mut values = vec![0.0; positions * 2 * half];
        for (position, row) in values.chunks_exact_mut(2 * half).enumerate() {
            for (pair, frequency) in frequencies.iter().enumerate() {
                let (cos, sin) = numerics::cos_sin(position as f64 * frequency);
                row[pair] = cos;
                row[half + pair] = sin;
            }
        }
        Self { half, values }
    }

    fn row(&self, position: usize) -> (&[f32], &[f32]) {
        self.values[position * 2 * self.half..][..2 * self.half].split_at(self.half)
    }
}

/// The tables of a model's layers.
pub(crate) struct RopeTables {
    full: RopeTable,
    /// Where layers with a sliding window rotate differently.
    windowed: Option<RopeTable>,
}

impl RopeTables {
    pub(crate) fn new(spec: &ModelSpec, positions: usize) -> Self {
        let windowed = spec.features.window.as_ref().map(|window| &window.rope);
        Self {
            full: RopeTable::new(&spec.rope, positions),
            windowed: windowed
                .filter(|rope| **rope != spec.rope)
                .map(|rope| RopeTable::new(rope, positions)),
        }
    }

    /// The table of layers with a sliding window, or of those without.
    pub(crate) fn of(&self, has_window: bool) -> &RopeTable {
        self.windowed.as_ref().filter(|_| has_window).unwrap_or(&self.full)
    }
}

fn frequency(spec: &RopeSpec, pair: usize) -> f64 {
    let plain = 1.0 / numerics::pow(spec.theta, 2.0 * pair as f64 / spec.dim as f64);
    match spec.scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear { factor } => plain / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context_tokens,
        } => {
            plain
                / llama3_factor(
                    pair,
                    spec.dim,
                    spec.theta,
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original_context_tokens,
                )
        }
    }
}

/// Rotates the heads of `row`, each of `head_dim`, to `position`, and multiplies with `scale`.
#[inline(always)]
pub(crate) fn rotate(
    table: &RopeTable,
    position: usize,
    row: &mut [f32],
    head_dim: usize,
    scale: f32,
) {
    let (cos, sin) = table.row(position);
    for head in row.chunks_exact_mut(head_dim) {
        let (first, rest) = head.split_at_mut(table.half);
        let second = &mut rest[..table.half];
        for i in 0..table.half {
            let (a, b) = (first[i], second[i]);
            first[i] = a.mul_add(cos[i], -(b * sin[i])) * scale;
            second[i] = a.mul_add(sin[i], b * cos[i]) * scale;
        }
        for x in &mut rest[table.half..] {
            *x *= scale;
        }
    }
}
