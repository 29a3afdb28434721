use proptest::prelude::*;

use super::*;

fn convert(from: KvDtype, to: KvDtype, shape: (u16, u16, usize), payload: &[u8]) -> Vec<u8> {
    let (heads, head_dim, tokens) = shape;
    // What is there already stays.
    let mut out = vec![7; 3];
    let conversion = KvConversion::new(from, to, heads, head_dim).unwrap();
    conversion.convert(payload, tokens, &mut out).unwrap();
    assert_eq!(out[..3], [7; 3]);
    out.split_off(3)
}

fn floats(payload: &[u8]) -> Vec<f32> {
    payload.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Any of 25 pairs, so that 1,500 cases have some sixty of each.
fn pair() -> impl Strategy<Value = (KvDtype, KvDtype)> {
    let all = prop::sample::select(&KvDtype::ALL);
    (all.clone(), all)
}

/// Heads, elements of a head and tokens: a model's sizes, and any even one.
fn shape() -> impl Strategy<Value = (u16, u16, usize)> {
    let head_dim = prop_oneof![(1..=16_u16).prop_map(|d| 16 * d), (1..=50_u16).prop_map(|d| 2 * d)];
    (1..=4_u16, head_dim, 1..=40_usize)
}

/// Numbers of `count` vectors, most of one size and some that stand out, as K has them. None is so
/// small that a scale of half precision is subnormal.
fn numbers(count: usize, head_dim: usize, seed: u64) -> Vec<f32> {
    let mut x = seed | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut all = Vec::with_capacity(count * head_dim);
    for _ in 0..count {
        let size = 10.0_f32.powi((next() * 4.0) as i32) * 2.0;
        for _ in 0..head_dim {
            let outlier = if next() > 0.45 { 9.0 } else { 1.0 };
            all.push(next() * size * outlier);
        }
        // One is surely far from zero.
        let last = all.len() - 1;
        all[last] = size;
    }
    all
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// How far a number may be moved by being stored, where `most` is the largest of its vector.
fn near(dtype: KvDtype, number: f32, most: f32) -> f32 {
    match dtype {
        KvDtype::F32 => 0.0,
        // Half of the last bit; or of the last that a subnormal number has.
        KvDtype::F16 => (number.abs() / 2048.0).max(f32::powi(2.0, -25)),
        KvDtype::Bf16 => number.abs() / 256.0,
        // Half a step, and what 127 steps gain or lose where the scale is rounded.
        KvDtype::Int8 => most / 127.0 * (0.5 + 127.0 / 2048.0 + 1e-3),
        // A step: what is as far from zero as the farthest, on the other side, ends at 7/8 of it.
        KvDtype::Int4 => most / 8.0 * (1.0 + 8.0 / 2048.0 + 1e-3),
    }
}

/// Whether every number of `from` is one of `to`, and comes back to the bit.
fn is_lossless(from: KvDtype, to: KvDtype) -> bool {
    from == to || to == KvDtype::F32
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    /// What is far from a number is never stored for it, whatever precision it had before.
    #[test]
    fn numbers_stay_near((from, to) in pair(), shape in shape(), seed in any::<u64>()) {
        let (heads, head_dim, tokens) = shape;
        let (vectors, dim) = (2 * usize::from(heads) * tokens, usize::from(head_dim));
        let exact = bytes_of(&numbers(vectors, dim, seed));
        let source = convert(KvDtype::F32, from, shape, &exact);
        prop_assert_eq!(source.len(), vectors * from.vector_bytes(dim));
        let target = convert(from, to, shape, &source);
        prop_assert_eq!(target.len(), vectors * to.vector_bytes(dim));
        if from == to {
            prop_assert!(source == target, "equal precision is the identity");
        }
        let mut wanted = floats(&convert(from, KvDtype::F32, shape, &source));
        let mut got = floats(&convert(to, KvDtype::F32, shape, &target));
        for (wanted, got) in wanted.chunks_exact_mut(dim).zip(got.chunks_exact_mut(dim)) {
            // What four bits can hold is known of the rotated numbers.
            if to == KvDtype::Int4 {
                hadamard::rotate(wanted);
                hadamard::rotate(got);
            }
            let most = wanted.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            // Rotations round too, and a vector that stays as it is goes through two of them.
            let is_rotated = from == KvDtype::Int4 || to == KvDtype::Int4;
            let slack = if is_rotated { most * 1e-5 } else { 0.0 };
            for (wanted, got) in wanted.iter().zip(got) {
                let bound = if from == to { 0.0 } else { near(to, *wanted, most) } + slack;
                prop_assert!((*got - wanted).abs() <= bound, "{from} {to} {wanted} {got} {bound}");
            }
        }
    }

    /// To a precision that holds all of it, and back.
    #[test]
    fn wider_and_back_is_the_same((from, to) in pair(), shape in shape(), seed in any::<u64>()) {
        let to = if is_lossless(from, to) { to } else { KvDtype::F32 };
        let (heads, head_dim, tokens) = shape;
        let vectors = 2 * usize::from(heads) * tokens;
        let exact = bytes_of(&numbers(vectors, usize::from(head_dim), seed));
        let source = convert(KvDtype::F32, from, shape, &exact);
        let wide = convert(from, to, shape, &source);
        prop_assert!(convert(to, from, shape, &wide) == source, "{from} {to}");
    }

    /// Whatever bytes come, not-a-number and infinity among them.
    #[test]
    fn any_bytes_are_converted((from, to) in pair(), shape in shape(), seed in any::<u64>()) {
        let (heads, head_dim, tokens) = shape;
        let vectors = 2 * usize::from(heads) * tokens;
        let length = vectors * from.vector_bytes(usize::from(head_dim));
        let noise = bytes_of(&numbers(length.div_ceil(4), 1, seed));
        // Of a product of such bytes some have every exponent.
        let payload: Vec<u8> =
            noise.iter().enumerate().map(|(at, byte)| byte.wrapping_mul(at as u8 | 1)).collect();
        let out = convert(from, to, shape, &payload[..length]);
        prop_assert_eq!(out.len(), vectors * to.vector_bytes(usize::from(head_dim)));
    }
}

#[test]
fn what_is_not_finite_shows() {
    let shape = (1, 32, 1);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut exact = vec![1.0_f32; 64];
        exact[5] = bad;
        for (from, to) in KvDtype::ALL.into_iter().flat_map(|a| KvDtype::ALL.map(|b| (a, b))) {
            let source = convert(KvDtype::F32, from, shape, &bytes_of(&exact));
            let target = convert(from, to, shape, &source);
            let got = floats(&convert(to, KvDtype::F32, shape, &target));
            assert!(got[..32].iter().any(|x| !x.is_finite()), "{from} {to} {bad}");
            // V of the same head is another vector.
            assert!(got[32..].iter().all(|x| x.is_finite()), "{from} {to} {bad}");
        }
    }
}

#[test]
fn zero_is_zero_in_every_precision() {
    let shape = (2, 48, 3);
    let exact = vec![0; 2 * 2 * 48 * 3 * 4];
    for (from, to) in KvDtype::ALL.into_iter().flat_map(|a| KvDtype::ALL.map(|b| (a, b))) {
        let target = convert(from, to, shape, &convert(KvDtype::F32, from, shape, &exact));
        assert!(floats(&convert(to, KvDtype::F32, shape, &target)).iter().all(|x| *x == 0.0));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let new = KvConversion::new;
    let error = new(KvDtype::Bf16, KvDtype::Int4, 2, 15).unwrap_err();
    assert_eq!(error, KvConversionError::HeadDim { head_dim: 15, dtype: KvDtype::Int4 });
    assert!(new(KvDtype::Int4, KvDtype::F32, 2, 15).is_err());
    for (heads, head_dim) in [(0, 16), (2, 0)] {
        assert!(new(KvDtype::Bf16, KvDtype::Int8, heads, head_dim).is_err());
    }
    // An odd head is whole in all others.
    let odd = (1, 15, 2);
    let exact = bytes_of(&numbers(4, 15, 1));
    let int8 = convert(KvDtype::F32, KvDtype::Int8, odd, &exact);
    assert_eq!(int8.len(), 4 * 17);
    assert_eq!(convert(KvDtype::Int8, KvDtype::Bf16, odd, &int8).len(), 4 * 30);
    for (from, to) in KvDtype::ALL.into_iter().flat_map(|a| KvDtype::ALL.map(|b| (a, b))) {
        let conversion = new(from, to, 2, 16).unwrap();
        let want = 2 * 2 * 3 * from.vector_bytes(16);
        for (got, tokens) in [(want - 1, 3), (want + 1, 3), (0, 3), (want, 4), (want, usize::MAX)] {
            let mut out = vec![1];
            let error = conversion.convert(&vec![0; got], tokens, &mut out).unwrap_err();
            assert!(matches!(error, KvConversionError::PayloadSize { .. }), "{error}");
            assert_eq!(out, [1], "nothing is appended");
        }
        conversion.convert(&[], 0, &mut Vec::new()).unwrap();
    }
}
