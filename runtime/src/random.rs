//! Random numbers that name things: incarnations, requests, transfers, seeds.

/// 64 random bits, never 0: where an id may be absent, 0 stands for that.
pub fn nonzero_u64() -> u64 {
    rand::random::<u64>().max(1)
}

/// So many random bytes.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    rand::RngCore::fill_bytes(&mut rand::rng(), &mut bytes);
    bytes
}

/// A wait of `ms` with up to half of it added or taken, so that many do not act at once.
pub fn jittered_ms(ms: u64) -> std::time::Duration {
    let factor = 0.5 + rand::random::<f64>();
    std::time::Duration::from_millis((ms as f64 * factor) as u64)
}
