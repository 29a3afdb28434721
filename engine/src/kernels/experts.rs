//! Which experts a token takes, and the sum of what they yield. Plain arithmetic, not fused: it
//! runs in code that is compiled for every machine.

use std::ops::Range;

use super::numerics::exp_unfused;

/// One expert that a row takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pick {
    pub(crate) expert: u32,
    pub(crate) weight: f32,
}

/// Fills `picks[used]` with the experts of the largest `scores[experts]`, largest first, of equal
/// ones the lower id; their weights are softmax's over all scores, or scaled to a sum of 1.
///
/// `e = e^(score - max)`; sums are one chain, over the picks in their order where weights are
/// normalised, otherwise over all experts in ascending order.
///
/// # Panics
/// When there are fewer scores than picks.
pub(crate) fn pick(scores: &[f32], normalize_weights: bool, picks: &mut [Pick]) {
    for i in 0..picks.len() {
        let (taken, rest) = picks.split_at_mut(i);
        let mut best: Option<(usize, f32)> = None;
        for (expert, &score) in scores.iter().enumerate() {
            let is_taken = taken.iter().any(|pick| pick.expert as usize == expert);
            if !is_taken && best.is_none_or(|(_, best)| score > best) {
                best = Some((expert, score));
            }
        }
        let (expert, score) = best.expect("there are at least as many experts as are taken");
        rest[0] = Pick { expert: expert as u32, weight: score };
    }
    let max = picks[0].weight;
    let all = scores.iter().fold(0.0, |sum, score| sum + exp_unfused(score - max));
    for pick in &mut *picks {
        pick.weight = exp_unfused(pick.weight - max);
    }
    let taken = picks.iter().fold(0.0, |sum, pick| sum + pick.weight);
    let sum = if normalize_weights { taken } else { all };
    for pick in picks {
        pick.weight /= sum;
    }
}

/// `out[K] = Σ weight * slot`, in the order of the picks; the first product stands alone.
///
/// # Panics
/// When a slot is shorter than `out`.
pub(crate) fn combine<'a>(slots: impl Iterator<Item = (f32, &'a [f32])>, out: &mut [f32]) {
    for (i, (weight, slot)) in slots.enumerate() {
        let slot = &slot[..out.len()];
        if i == 0 {
            out.iter_mut().zip(slot).for_each(|(out, x)| *out = weight * x);
        } else {
            out.iter_mut().zip(slot).for_each(|(out, x)| *out += weight * x);
        }
    }
}

/// The rows of a step, expert by expert. A slot is a row at one of its experts.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    /// `[row][used]`: the slot of each pick.
    pub(crate) slots: Vec<usize>,
    /// The row of each slot.
    pub(crate) rows: Vec<usize>,
    /// Experts that some row takes, ascending, and their slots.
    pub(crate) experts: Vec<(usize, Range<usize>)>,
}

impl Routes {
    /// Lays out the slots of `picks[row][used]` among `count` experts; an expert's rows ascend.
    pub(crate) fn plan(&mut self, picks: &[Pick], used: usize, count: usize) {
        let mut ends = vec![0; count];
        for pick in picks {
            ends[pick.expert as usize] += 1;
        }
        self.experts.clear();
        let mut end = 0;
        for (expert, rows) in ends.iter_mut().enumerate() {
            let start = end;
            end += *rows;
            if *rows > 0 {
                self.experts.push((expert, start..end));
            }
            // From here on where the expert's next slot is.
            *rows = start;
        }
        self.slots.clear();
        self.rows.clear();
        self.rows.resize(picks.len(), 0);
        for (i, pick) in picks.iter().enumerate() {
            let next = &mut ends[pick.expert as usize];
            self.slots.push(*next);
            self.rows[*next] = i / used;
            *next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_taken_and_ties_go_to_the_lower_id() {
        let mut picks = [Pick::default(); 3];
        pick(&[1.0, 2.0, 0.5, 2.0, 1.0], true, &mut picks);
        assert_eq!(picks.map(|pick| pick.expert), [1, 3, 0]);
        assert_eq!(picks[0].weight, picks[1].weight);
        let sum: f32 = picks.iter().map(|pick| pick.weight).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        let want = 1.0 / (2.0 + libm::expf(-1.0));
        assert!((picks[0].weight - want).abs() < 1e-6);
        pick(&[1.0, 2.0, 0.5, 2.0, 1.0], false, &mut picks);
        let all = 2.0 + 2.0 * libm::expf(-1.0) + libm::expf(-1.5);
        assert!((picks[2].weight - libm::expf(-1.0) / all).abs() < 1e-6);
    }

    #[test]
    fn nan_shows_and_takes_each_expert_once() {
        let mut picks = [Pick::default(); 2];
        pick(&[f32::NAN, f32::NAN, f32::NAN], true, &mut picks);
        assert_eq!(picks.map(|pick| pick.expert), [0, 1]);
        assert!(picks.iter().all(|pick| pick.weight.is_nan()));
    }

    #[test]
    fn slots_are_sorted_by_expert() {
        let picks = [2, 0, 0, 1, 2, 1].map(|expert| Pick { expert, weight: 1.0 });
        let mut routes = Routes::default();
        routes.plan(&picks, 2, 4);
        assert_eq!(routes.experts, [(0, 0..2), (1, 2..4), (2, 4..6)]);
        assert_eq!(routes.rows, [0, 1, 1, 2, 0, 2]);
        assert_eq!(routes.slots, [4, 0, 1, 2, 5, 3]);
    }
}
