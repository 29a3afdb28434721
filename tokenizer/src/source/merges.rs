//! BPE merges for vocabularies that have scores instead.

use std::cmp::Reverse;
use std::collections::HashMap;

/// A token that text may become.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored<'v> {
    pub(super) text: &'v str,
    pub(super) score: f32,
}

/// Pairs of tokens whose texts joined are a token, best first: by the score of the whole, then
/// the longer left part, as Hugging Face's `generate_merges` orders them.
///
/// `tokens`: in the order of their ids.
pub(super) fn from_scores(tokens: &[Scored<'_>]) -> Vec<(String, String)> {
    let ranks: HashMap<&str, usize> =
        tokens.iter().enumerate().map(|(rank, token)| (token.text, rank)).collect();
    let mut merges = Vec::new();
    for token in tokens {
        let mut pairs: Vec<_> = token
            .text
            .char_indices()
            .skip(1)
            .map(|(cut, _)| token.text.split_at(cut))
            .filter_map(|(left, right)| Some((*ranks.get(left)?, *ranks.get(right)?, left, right)))
            .collect();
        pairs.sort_by_key(|pair| (pair.0, pair.1));
        merges.extend(pairs.into_iter().map(|(_, _, left, right)| (token.score, left, right)));
    }
    merges.sort_by(|a, b| {
        let lengths = |left: &str, right: &str| (left.chars().count(), right.chars().count());
        b.0.total_cmp(&a.0)
            .then_with(|| Reverse(lengths(a.1, a.2)).cmp(&Reverse(lengths(b.1, b.2))))
    });
    merges.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_by_score_then_length() {
        let tokens = [("a", -9.0), ("b", -9.0), ("ab", -2.0), ("ba", -1.0), ("aba", -3.0)]
            .map(|(text, score)| Scored { text, score });
        let merges = from_scores(&tokens);
        let merges: Vec<_> = merges.iter().map(|(l, r)| (l.as_str(), r.as_str())).collect();
        assert_eq!(merges, [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]);
    }
}
