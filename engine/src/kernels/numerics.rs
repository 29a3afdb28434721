//! The one place for transcendental functions and rounding, the same on every machine.
//!
//! The standard library's `exp`, `sin` and so on come from the system's libm and differ between
//! systems, so `clippy.toml` bans them everywhere. Here exponentials are polynomials in plain
//! fused arithmetic, and tables are made with the `libm` crate (musl's algorithms in Rust).

use crate::simd::Lanes;

/// Coefficients of 2^f for f in [-1/2, 1/2], highest power first: the minimax polynomial of the
/// relative error (Remez; 8e-8), its last one set to 1 so that `exp2(0)` is 1.
#[allow(clippy::approx_constant)] // ln 2 is near one of them by nature
const EXP2: [f32; 6] =
    [1.327_647_2e-3, 9.675_541e-3, 5.550_713_3e-2, 2.402_212e-1, 6.931_47e-1, 1.0];

/// Results stay normal numbers within these exponents.
const EXP2_MIN: f32 = -125.0;
const EXP2_MAX: f32 = 127.0;

/// `2^x`, at least 2^-125 and at most 2^127; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp2_lanes<L: Lanes>(l: L, x: L::F) -> L::F {
    let x = l.min(l.splat(EXP2_MAX), l.max(l.splat(EXP2_MIN), x));
    let n = l.round(x);
    let f = l.sub(x, l.to_float(n));
    let mut p = l.splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = l.fma(p, f, l.splat(*c));
    }
    l.scale_exponent(p, n)
}

/// `2^x` with the bits of every lane of the kernels'.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let x = if EXP2_MIN > x { EXP2_MIN } else { x };
    let x = if EXP2_MAX < x { EXP2_MAX } else { x };
    if x.is_nan() {
        return x;
    }
    // 1.5 * 2^23 leaves the integer nearest to x, ties to even, in the low bits.
    let n = (x + 12_582_912.0) - 12_582_912.0;
    let f = x - n;
    let p = EXP2[1..].iter().fold(EXP2[0], |p, c| p.mul_add(f, *c));
    f32::from_bits(p.to_bits().wrapping_add((n as i32 as u32) << 23))
}

/// `e^x`, within the range of [`exp2`].
pub fn exp(x: f32) -> f32 {
    exp2(x * std::f32::consts::LOG2_E)
}

/// `e^x` for `x <= 0`, to about 2 ulp, without fused arithmetic: whole vocabularies go through it
/// in the sampler, in code that is compiled for every machine, where a fused operation would be a
/// call. 2^n · p(f) with the Taylor polynomial of 2^f on [-1/2, 1/2].
pub fn exp_unfused(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    let scaled = x * std::f32::consts::LOG2_E;
    // Adding and taking away 1.5 · 2^23 rounds to a whole number, ties to even.
    let whole = (scaled + 12_582_912.0) - 12_582_912.0;
    let f = scaled - whole;
    let p = 1.540_353e-4;
    let p = p * f + 1.333_355_8e-3;
    let p = p * f + 9.618_13e-3;
    let p = p * f + 5.550_411e-2;
    let p = p * f + 2.402_265e-1;
    let p = p * f + std::f32::consts::LN_2;
    let p = p * f + 1.0;
    p * f32::from_bits(((whole as i32 + 127) << 23) as u32)
}

/// Natural logarithm.
pub fn ln(x: f64) -> f64 {
    libm::log(x)
}

/// `gate / (1 + e^-gate) * up` in each lane.
#[inline(always)]
pub(crate) fn silu_mul<L: Lanes>(l: L, gate: L::F, up: L::F) -> L::F {
    let e = exp2_lanes(l, l.mul(gate, l.splat(-std::f32::consts::LOG2_E)));
    l.div(l.mul(gate, up), l.add(e, l.splat(1.0)))
}

/// `gelu(gate) * up` in each lane, GELU by its approximation with a hyperbolic tangent:
/// `gate / (1 + e^(-2y)) * up`, `y = sqrt(2 / pi) * (gate + 0.044715 gate³)`.
#[inline(always)]
pub(crate) fn gelu_mul<L: Lanes>(l: L, gate: L::F, up: L::F) -> L::F {
    /// `-2 sqrt(2 / pi) log2(e)`
    const SCALE: f32 = -2.302_208_2;
    let cubic = l.fma(l.mul(gate, gate), l.splat(0.044_715), l.splat(1.0));
    let e = exp2_lanes(l, l.mul(l.mul(gate, cubic), l.splat(SCALE)));
    l.div(l.mul(gate, up), l.add(e, l.splat(1.0)))
}

/// Bits of the bfloat16 nearest to `x`, ties to even; NaN stays NaN.
#[inline(always)]
pub fn bf16_round(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The number whose bfloat16 bits are `bits`.
#[inline(always)]
pub fn bf16_widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Bits of the half-precision number nearest to `x`, ties to even; NaN stays NaN.
pub fn f16_round(x: f32) -> u16 {
    half::f16::from_f32_const(x).to_bits()
}

/// The number whose half-precision bits are `bits`.
pub fn f16_widen(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32_const()
}

/// `(cos, sin)` of an angle in radians.
pub(crate) fn cos_sin(angle: f64) -> (f32, f32) {
    (libm::cos(angle) as f32, libm::sin(angle) as f32)
}

/// `x^y`.
pub(crate) fn pow(x: f64, y: f64) -> f64 {
    libm::pow(x, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_is_close_and_monotonic_enough() {
        let mut worst = 0.0f64;
        for i in -12_000..12_000 {
            let x = i as f32 * 0.01;
            let want = libm::exp2(f64::from(x));
            worst = worst.max((f64::from(exp2(x)) / want - 1.0).abs());
        }
        assert!(worst < 3e-7, "relative error {worst}");
        assert!(exp2(f32::NAN).is_nan());
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(f32::NEG_INFINITY), exp2(-125.0));
    }

    #[test]
    fn bf16_rounds_to_even() {
        for (x, want) in [(1.0, 0x3f80), (1.003_906_3, 0x3f80), (1.011_718_8, 0x3f82)] {
            assert_eq!(bf16_round(x), want);
        }
        assert!(bf16_widen(bf16_round(f32::NAN)).is_nan());
        assert_eq!(bf16_widen(bf16_round(f32::MAX)), f32::INFINITY);
        for bits in 0..=u16::MAX {
            let x = bf16_widen(bits);
            assert!(x.is_nan() || bf16_round(x) == bits);
        }
    }
}
