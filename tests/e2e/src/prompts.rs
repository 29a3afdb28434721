//! Texts that look like language, from a seed: no two seeds share their first words.

const NOUNS: [&str; 16] = [
    "river", "engine", "teacher", "garden", "letter", "machine", "village", "winter", "signal",
    "bridge", "kitchen", "captain", "forest", "answer", "market", "mirror",
];
const VERBS: [&str; 12] = [
    "follows",
    "builds",
    "remembers",
    "crosses",
    "explains",
    "carries",
    "repairs",
    "watches",
    "leaves",
    "finds",
    "paints",
    "counts",
];
const ADJECTIVES: [&str; 12] = [
    "old", "quiet", "bright", "narrow", "early", "heavy", "honest", "distant", "green", "broken",
    "patient", "sudden",
];

/// A small generator; tests need no better one.
#[derive(Clone, Debug)]
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    /// Uniform below `bound`, near enough.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % bound
    }
}

/// About `words` words.
pub fn text(seed: u64, words: usize) -> String {
    let mut numbers = Numbers::new(seed);
    let mut text = format!("Story {seed}.");
    let mut written = 2;
    while written < words {
        let mut pick = |from: &[&'static str]| from[numbers.below(from.len())];
        let (adjective, noun) = (pick(&ADJECTIVES), pick(&NOUNS));
        let (verb, other) = (pick(&VERBS), pick(&NOUNS));
        text.push_str(&format!(" The {adjective} {noun} {verb} the {other}."));
        written += 6;
    }
    text
}
