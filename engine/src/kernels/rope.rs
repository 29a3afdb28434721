//! Rotary position embedding (Su et al., "RoFormer", 2021), halves against one another.

use baton_model_files::llama3_factor;
use baton_types::{ModelSpec, RopeScaling, RopeSpec};

use super::numerics;

/// Cosines and sines of positions and dimension pairs.
pub(crate) struct RopeTable {
    /// Of each pair: radians from one position to the next.
    frequencies: Vec<f64>,
    /// `[position][cos of the pairs, sin of the pairs]`, of the first positions.
    values: Vec<f32>,
    /// The same for rows of the step at hand whose positions lie behind those.
    of_rows: Vec<f32>,
}

/// Cosines and sines of one position: `[pair]`.
#[derive(Clone, Copy)]
pub(crate) struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
}

impl RopeTable {
    /// Of the positions `0..positions`, computed in f64 and rounded once.
    pub(crate) fn new(spec: &RopeSpec, positions: usize) -> Self {
        let half = spec.dim / 2;
        let frequencies: Vec<f64> = (0..half).map(|pair| frequency(spec, pair)).collect();
        let mut values = vec![0.0; positions * 2 * half];
        for (position, row) in values.chunks_exact_mut(2 * half).enumerate() {
            fill(&frequencies, position, row);
        }
        Self { frequencies, values, of_rows: Vec::new() }
    }

    /// Makes the table ready for a step whose rows are at `positions`.
    pub(crate) fn prepare(&mut self, positions: impl ExactSizeIterator<Item = usize>) {
        let width = 2 * self.frequencies.len();
        let held = self.values.len() / width;
        self.of_rows.resize(positions.len() * width, 0.0);
        for (position, row) in positions.zip(self.of_rows.chunks_exact_mut(width)) {
            if position >= held {
                fill(&self.frequencies, position, row);
            }
        }
    }

    /// Of `position`, at which `row` of the step is.
    pub(crate) fn angles(&self, position: usize, row: usize) -> Angles<'_> {
        let width = 2 * self.frequencies.len();
        let held = self.values.get(position * width..(position + 1) * width);
        Angles::new(held.unwrap_or_else(|| &self.of_rows[row * width..(row + 1) * width]))
    }

    /// Of one of the first positions.
    pub(crate) fn held_angles(&self, position: usize) -> Angles<'_> {
        let width = 2 * self.frequencies.len();
        Angles::new(&self.values[position * width..(position + 1) * width])
    }
}

impl<'a> Angles<'a> {
    /// From `row[cos of the pairs, sin of the pairs]`.
    fn new(row: &'a [f32]) -> Self {
        let (cos, sin) = row.split_at(row.len() / 2);
        Self { cos, sin }
    }
}

/// `row[cos of the pairs, sin of the pairs]` at `position`.
fn fill(frequencies: &[f64], position: usize, row: &mut [f32]) {
    let (cos, sin) = row.split_at_mut(frequencies.len());
    for (pair, frequency) in frequencies.iter().enumerate() {
        (cos[pair], sin[pair]) = numerics::cos_sin(position as f64 * frequency);
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

    /// Makes the tables ready for a step whose rows are at `positions`.
    pub(crate) fn prepare(&mut self, positions: impl ExactSizeIterator<Item = usize> + Clone) {
        if let Some(windowed) = &mut self.windowed {
            windowed.prepare(positions.clone());
        }
        self.full.prepare(positions);
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

/// Rotates the heads of `row`, each of `head_dim`, by `angles`, and multiplies with `scale`.
#[inline(always)]
pub(crate) fn rotate(angles: Angles<'_>, row: &mut [f32], head_dim: usize, scale: f32) {
    let half = angles.cos.len();
    let (cos, sin) = (angles.cos, &angles.sin[..half]);
    for head in row.chunks_exact_mut(head_dim) {
        let (first, rest) = head.split_at_mut(half);
        let second = &mut rest[..half];
        for i in 0..half {
            let (a, b) = (first[i], second[i]);
            first[i] = a.mul_add(cos[i], -(b * sin[i])) * scale;
            second[i] = a.mul_add(sin[i], b * cos[i]) * scale;
        }
        for x in &mut rest[half..] {
            *x *= scale;
        }
    }
}
