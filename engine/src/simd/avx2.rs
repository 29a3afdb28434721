//! Two 256-bit registers: lanes 0..8 and 8..16.

use std::arch::x86_64::*;

use super::avx512::Avx512;
use super::{LANES, Lanes};

/// Sixteen lanes of `f32`.
pub(crate) type Avx2Lanes = [__m256; 2];

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// `Isa::Avx2.is_available()`.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// A token that proves AVX2 to be there.
pub(super) trait HasAvx2: Copy {}
impl HasAvx2 for Avx2 {}
impl HasAvx2 for Avx512 {}

/// One expression of intrinsics.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: a token in scope was made by a constructor whose caller vouched for the
        // instructions; pointers come from references to as many bytes as are read or written.
        unsafe { $e }
    };
}

/// The same operation on both registers.
macro_rules! both {
    ($f:ident($a:expr)) => {
        op!([$f($a[0]), $f($a[1])])
    };
    ($f:ident($a:expr, $b:expr)) => {
        op!([$f($a[0], $b[0]), $f($a[1], $b[1])])
    };
}

/// Sum of sixteen lanes in the order that [`Lanes::reduce_add`] fixes.
#[inline(always)]
pub(super) fn reduce_add(_proof: impl HasAvx2, x: Avx2Lanes) -> f32 {
    op!({
        let x = _mm256_add_ps(x[0], x[1]);
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    })
}

/// Maximum of sixteen lanes in the order that [`Lanes::reduce_max`] fixes.
#[inline(always)]
pub(super) fn reduce_max(_proof: impl HasAvx2, x: Avx2Lanes) -> f32 {
    op!({
        let x = _mm256_max_ps(x[0], x[1]);
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    })
}

/// `acc + Σ w[j] * a[j]` in each lane; pairs of products must fit into 16 bits.
#[inline(always)]
fn dot(_proof: Avx2, acc: [__m256i; 2], w: [__m256i; 2], a: [__m256i; 2]) -> [__m256i; 2] {
    let pairs = both!(_mm256_maddubs_epi16(w, a));
    let ones = op!(_mm256_set1_epi16(1));
    let sums = both!(_mm256_madd_epi16(pairs, [ones, ones]));
    both!(_mm256_add_epi32(acc, sums))
}

impl Lanes for Avx2 {
    type F = Avx2Lanes;
    type I = [__m256i; 2];
    const MANY_REGISTERS: bool = false;
    const TILES: bool = true;
    const BYTES_START: i32 = 0;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        op!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        op!([_mm256_set1_epi32(x); 2])
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        op!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())])
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        op!({
            _mm256_storeu_ps(to.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(to[8..].as_mut_ptr(), x[1]);
        })
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        op!([
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(x[8..].as_ptr().cast())),
        ])
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        self.low_bf16(op!([
            _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(x[8..].as_ptr().cast())),
        ]))
    }

    #[inline(always)]
    fn load_i(self, x: &[u32; LANES]) -> Self::I {
        op!([_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x[8..].as_ptr().cast()),])
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        op!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn keep_first(self, count: usize, a: Self::F, b: Self::F) -> Self::F {
        op!({
            let count = _mm256_set1_epi32(count.min(LANES) as i32);
            let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
            let masks = [_mm256_cmpgt_epi32(count, low), _mm256_cmpgt_epi32(count, high)];
            [
                _mm256_blendv_ps(b[0], a[0], _mm256_castsi256_ps(masks[0])),
                _mm256_blendv_ps(b[1], a[1], _mm256_castsi256_ps(masks[1])),
            ]
        })
    }

    #[inline(always)]
    fn reduce_add(self, x: Self::F) -> f32 {
        reduce_add(self, x)
    }

    #[inline(always)]
    fn reduce_max(self, x: Self::F) -> f32 {
        reduce_max(self, x)
    }

    #[inline(always)]
    fn round(self, x: Self::F) -> Self::I {
        both!(_mm256_cvtps_epi32(x))
    }

    #[inline(always)]
    fn to_float(self, x: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps(x))
    }

    #[inline(always)]
    fn scale_exponent(self, x: Self::F, n: Self::I) -> Self::F {
        let n = op!([_mm256_slli_epi32::<23>(n[0]), _mm256_slli_epi32::<23>(n[1])]);
        let bits = both!(_mm256_castps_si256(x));
        let bits = both!(_mm256_add_epi32(bits, n));
        both!(_mm256_castsi256_ps(bits))
    }

    #[inline(always)]
    fn abs_bits(self, x: Self::F) -> Self::I {
        let bits = both!(_mm256_castps_si256(x));
        let mask = self.splat_i(0x7fff_ffff);
        both!(_mm256_and_si256(bits, mask))
    }

    #[inline(always)]
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_max_epi32(a, b))
    }

    #[inline(always)]
    fn reduce_add_i(self, x: Self::I) -> i32 {
        op!({
            let x = _mm256_add_epi32(x[0], x[1]);
            let x = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_add_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
        })
    }

    #[inline(always)]
    fn reduce_max_i(self, x: Self::I) -> i32 {
        op!({
            let x = _mm256_max_epi32(x[0], x[1]);
            let x = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_max_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
        })
    }

    #[inline(always)]
    fn store_bytes(self, x: Self::I, to: &mut [i8; LANES]) {
        op!({
            // The packs work within 128-bit halves; values fit, so that saturation never acts.
            let words = _mm256_packs_epi32(x[0], x[1]);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        })
    }

    #[inline(always)]
    fn low_bf16(self, x: Self::I) -> Self::F {
        let bits = op!([_mm256_slli_epi32::<16>(x[0]), _mm256_slli_epi32::<16>(x[1])]);
        both!(_mm256_castsi256_ps(bits))
    }

    #[inline(always)]
    fn high_bf16(self, x: Self::I) -> Self::F {
        let mask = self.splat_i(0xffff_0000u32 as i32);
        let bits = both!(_mm256_and_si256(x, mask));
        both!(_mm256_castsi256_ps(bits))
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::I {
        op!([_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x[32..].as_ptr().cast()),])
    }

    #[inline(always)]
    fn store_quads(self, x: Self::I, to: &mut [u8; 4 * LANES]) {
        op!({
            _mm256_storeu_si256(to.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(to[32..].as_mut_ptr().cast(), x[1]);
        })
    }

    #[inline(always)]
    fn low_nibbles(self, x: Self::I) -> Self::I {
        let mask = op!([_mm256_set1_epi8(15); 2]);
        both!(_mm256_and_si256(x, mask))
    }

    #[inline(always)]
    fn high_nibbles(self, x: Self::I) -> Self::I {
        self.low_nibbles(op!([_mm256_srli_epi16::<4>(x[0]), _mm256_srli_epi16::<4>(x[1])]))
    }

    #[inline(always)]
    fn bits(self, x: Self::I, down: i32, mask: u8) -> Self::I {
        let count = op!([_mm_cvtsi32_si128(down.abs()); 2]);
        let mask = op!([_mm256_set1_epi8(mask as i8); 2]);
        let moved = if down >= 0 {
            both!(_mm256_srl_epi16(x, count))
        } else {
            both!(_mm256_sll_epi16(x, count))
        };
        both!(_mm256_and_si256(moved, mask))
    }

    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], x: Self::I) -> Self::I {
        let table = op!([_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())); 2]);
        both!(_mm256_shuffle_epi8(table, x))
    }

    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES / 2]) -> Self::I {
        const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        let x = u64::from_le_bytes(*x);
        let (low, high) = (x & LOW, x >> 4 & LOW);
        let halves = op!(_mm_set_epi64x(high as i64, low as i64));
        op!([_mm256_cvtepu8_epi32(halves), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(halves))])
    }

    #[inline(always)]
    fn load_signed(self, x: &[u8; LANES]) -> Self::I {
        op!([
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast())),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(x[8..].as_ptr().cast())),
        ])
    }

    #[inline(always)]
    fn dot_small(self, acc: Self::I, w: Self::I, a: i32) -> Self::I {
        dot(self, acc, w, self.splat_i(a))
    }

    #[inline(always)]
    fn dot_bytes(self, acc: Self::I, w: Self::I, a: i32) -> Self::I {
        // Stored weights plus 128 would overflow 16 bits: |w| * ±a, at most 2 * 128 * 127.
        let flip = op!([_mm256_set1_epi8(-128); 2]);
        let signed = both!(_mm256_xor_si256(w, flip));
        let a = both!(_mm256_sign_epi8(self.splat_i(a), signed));
        dot(self, acc, both!(_mm256_abs_epi8(signed)), a)
    }

    #[inline(always)]
    fn prefetch(self, x: *const u8) {
        // SAFETY: a prefetch faults for no address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(x.cast()) }
    }
}
