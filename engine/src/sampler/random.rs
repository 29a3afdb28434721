//! The counter-based generator: a number for each (seed, choice, index), with no state between.

/// Uniform in [0, 1), 53 bits. Two rounds of the finaliser of SplitMix64 (Steele, Lea, Flood:
/// Fast Splittable Pseudorandom Number Generators, 2014) over the three keys.
pub(super) fn uniform(seed: u64, choice: u16, index: u32) -> f64 {
    let counter = (u64::from(choice) << 32) | u64::from(index);
    let bits = mix(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ mix(!counter));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// A bijection on 64 bits that spreads every bit.
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
