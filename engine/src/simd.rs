//! Sixteen 32-bit lanes, whatever the instruction set.
//!
//! A kernel is written once over [`Lanes`] and instantiated for each instruction set by
//! `kernels::dispatch`. Every operation gives the same bits in every implementation: integer
//! operations are exact, each floating-point operation rounds once to nearest even, products are
//! fused where `fma` says so, and reductions follow one tree. `Scalar` is the specification.
//!
//! A value of an implementing type is the proof that this processor has the instructions: it is
//! made by an unsafe constructor only, so that the operations themselves are safe to call.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod scalar;
#[cfg(test)]
mod tests;

/// Lanes of a register.
pub(crate) const LANES: usize = 16;

/// An instruction set that the kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl Isa {
    /// The best that this processor has.
    pub fn detect() -> Self {
        if Self::Avx512.is_available() {
            Self::Avx512
        } else if Self::Avx2.is_available() {
            Self::Avx2
        } else {
            Self::Scalar
        }
    }

    /// Whether this processor has it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        match self {
            Self::Scalar => true,
            Self::Avx2 => avx2,
            Self::Avx512 => avx512,
        }
    }

    /// Whether this processor has it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Scalar
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

/// Operations on sixteen lanes of `f32` (`F`) or of 32 bits (`I`).
pub(crate) trait Lanes: Copy {
    type F: Copy;
    type I: Copy;

    /// Whether there are registers for eight tokens beside the weights.
    const MANY_REGISTERS: bool;

    /// Whether weights are unpacked once for several tokens; saves code where speed is no aim.
    const TILES: bool;

    /// What the sum of the activations is multiplied with to start [`Lanes::dot_bytes`].
    const BYTES_START: i32;

    fn splat(self, x: f32) -> Self::F;
    fn splat_i(self, x: i32) -> Self::I;
    fn load(self, x: &[f32; LANES]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; LANES]);
    /// Sixteen half-precision numbers, widened.
    fn load_f16(self, x: &[u16; LANES]) -> Self::F;
    /// Sixteen bfloat16 numbers, widened.
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F;
    fn load_i(self, x: &[u32; LANES]) -> Self::I;

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`: `b` where either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The first `count` lanes of `a`, the others of `b`.
    fn keep_first(self, count: usize, a: Self::F, b: Self::F) -> Self::F;
    /// Sum of the lanes: halves onto one another, `x[i] + x[i + 8]`, then 4, 2, 1.
    fn reduce_add(self, x: Self::F) -> f32;
    /// Maximum of the lanes, in the same tree.
    fn reduce_max(self, x: Self::F) -> f32;

    /// Nearest integer, ties to even, for `|x| < 2^22`.
    fn round(self, x: Self::F) -> Self::I;
    fn to_float(self, x: Self::I) -> Self::F;
    /// `x * 2^n` by adding to the exponent; only where the result is normal.
    fn scale_exponent(self, x: Self::F, n: Self::I) -> Self::F;
    /// Bits of `|x|`, which order as the absolute values do, NaN above all.
    fn abs_bits(self, x: Self::F) -> Self::I;
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn reduce_add_i(self, x: Self::I) -> i32;
    fn reduce_max_i(self, x: Self::I) -> i32;
    /// The low byte of each lane.
    fn store_bytes(self, x: Self::I, to: &mut [i8; LANES]);

    /// The low half of each lane as bfloat16, widened.
    fn low_bf16(self, x: Self::I) -> Self::F;
    /// The high half of each lane as bfloat16, widened.
    fn high_bf16(self, x: Self::I) -> Self::F;

    /// Four bytes for each lane.
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::I;
    /// Four bytes of each lane.
    fn store_quads(self, x: Self::I, to: &mut [u8; 4 * LANES]);
    fn low_nibbles(self, x: Self::I) -> Self::I;
    fn high_nibbles(self, x: Self::I) -> Self::I;
    /// Each byte moved `down` bits down (up where it is negative), then masked; `mask` takes no bit
    /// that comes from another byte.
    fn bits(self, x: Self::I, down: i32, mask: u8) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Each byte, which is below 16, replaced by the table's.
    fn look_up(self, table: &[u8; 16], x: Self::I) -> Self::I;
    /// The low halves of eight bytes, then their high halves, widened.
    fn load_nibbles(self, x: &[u8; LANES / 2]) -> Self::I;
    /// Sixteen signed bytes, widened.
    fn load_signed(self, x: &[u8; LANES]) -> Self::I;
    /// In each lane `acc + Σ w[j] * a[j]`, `w` four unsigned bytes below 128, `a` four signed
    /// bytes in -127..=127, the same for all lanes.
    fn dot_small(self, acc: Self::I, w: Self::I, a: i32) -> Self::I;
    /// In each lane `acc + Σ (w[j] - 128) * a[j] - BYTES_START * Σ a[j]`, `w` four unsigned
    /// bytes. With `BYTES_START * Σ a` at the start the sum is the product of signed weights.
    fn dot_bytes(self, acc: Self::I, w: Self::I, a: i32) -> Self::I;

    /// Asks for the cache line at `x`, which may lie anywhere, into the second-level cache: weights
    /// that stream past came sooner so than into the first (measured, up to 1.4 times).
    fn prefetch(self, x: *const u8);
}
