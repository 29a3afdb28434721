//! One 512-bit register. `vpdpbusd` takes unsigned weights, so signed ones are stored plus 128.

use std::arch::x86_64::*;

use super::{LANES, Lanes};

/// Proof that the processor has AVX-512 F, BW, DQ, VL and VNNI, and AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// `Isa::Avx512.is_available()`.
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// One intrinsic: `self` proves that its instruction exists.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: `self` was made by `new`, whose caller vouched for the instructions; pointers
        // come from references to as many bytes as the instruction reads or writes.
        unsafe { $e }
    };
}

#[inline(always)]
fn halves_f(l: Avx512, x: __m512) -> super::avx2::Avx2Lanes {
    let _ = l;
    // SAFETY: a value of `Avx512` proves that the instructions exist.
    unsafe { [_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)] }
}

impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;
    const MANY_REGISTERS: bool = true;
    const TILES: bool = true;
    const BYTES_START: i32 = -128;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        op!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        op!(_mm512_loadu_ps(x.as_ptr()))
    }

    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32; LANES]) {
        op!(_mm512_storeu_ps(to.as_mut_ptr(), x))
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> __m512 {
        op!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
            _mm256_loadu_si256(x.as_ptr().cast())
        ))))
    }

    #[inline(always)]
    fn load_i(self, x: &[u32; LANES]) -> __m512i {
        op!(_mm512_loadu_si512(x.as_ptr().cast()))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn keep_first(self, count: usize, a: __m512, b: __m512) -> __m512 {
        let mask = if count >= LANES { u16::MAX } else { (1 << count) - 1 };
        op!(_mm512_mask_blend_ps(mask, b, a))
    }

    #[inline(always)]
    fn reduce_add(self, x: __m512) -> f32 {
        super::avx2::reduce_add(self, halves_f(self, x))
    }

    #[inline(always)]
    fn reduce_max(self, x: __m512) -> f32 {
        super::avx2::reduce_max(self, halves_f(self, x))
    }

    #[inline(always)]
    fn round(self, x: __m512) -> __m512i {
        op!(_mm512_cvtps_epi32(x))
    }

    #[inline(always)]
    fn to_float(self, x: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(x))
    }

    #[inline(always)]
    fn scale_exponent(self, x: __m512, n: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_add_epi32(
            _mm512_castps_si512(x),
            _mm512_slli_epi32::<23>(n)
        )))
    }

    #[inline(always)]
    fn abs_bits(self, x: __m512) -> __m512i {
        op!(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fff_ffff)))
    }

    #[inline(always)]
    fn max_i(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_max_epi32(a, b))
    }

    #[inline(always)]
    fn reduce_add_i(self, x: __m512i) -> i32 {
        op!(_mm512_reduce_add_epi32(x))
    }

    #[inline(always)]
    fn reduce_max_i(self, x: __m512i) -> i32 {
        op!(_mm512_reduce_max_epi32(x))
    }

    #[inline(always)]
    fn store_bytes(self, x: __m512i, to: &mut [i8; LANES]) {
        op!(_mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x)))
    }

    #[inline(always)]
    fn low_bf16(self, x: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)))
    }

    #[inline(always)]
    fn high_bf16(self, x: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000u32 as i32))))
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> __m512i {
        op!(_mm512_loadu_si512(x.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_quads(self, x: __m512i, to: &mut [u8; 4 * LANES]) {
        op!(_mm512_storeu_si512(to.as_mut_ptr().cast(), x))
    }

    #[inline(always)]
    fn low_nibbles(self, x: __m512i) -> __m512i {
        op!(_mm512_and_si512(x, _mm512_set1_epi8(15)))
    }

    #[inline(always)]
    fn high_nibbles(self, x: __m512i) -> __m512i {
        op!(_mm512_and_si512(_mm512_srli_epi16::<4>(x), _mm512_set1_epi8(15)))
    }

    #[inline(always)]
    fn bits(self, x: __m512i, down: i32, mask: u8) -> __m512i {
        let count = op!(_mm_cvtsi32_si128(down.abs()));
        let moved = if down >= 0 {
            op!(_mm512_srl_epi16(x, count))
        } else {
            op!(_mm512_sll_epi16(x, count))
        };
        op!(_mm512_and_si512(moved, _mm512_set1_epi8(mask as i8)))
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], x: __m512i) -> __m512i {
        op!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), x))
    }

    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES / 2]) -> Self::I {
        const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        let x = u64::from_le_bytes(*x);
        let (low, high) = (x & LOW, x >> 4 & LOW);
        let halves = op!(_mm_set_epi64x(high as i64, low as i64));
        op!(_mm512_cvtepu8_epi32(halves))
    }

    #[inline(always)]
    fn load_signed(self, x: &[u8; LANES]) -> __m512i {
        op!(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
    }

    #[inline(always)]
    fn dot_small(self, acc: __m512i, w: __m512i, a: i32) -> __m512i {
        op!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a)))
    }

    #[inline(always)]
    fn dot_bytes(self, acc: __m512i, w: __m512i, a: i32) -> __m512i {
        op!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a)))
    }

    #[inline(always)]
    fn prefetch(self, x: *const u8) {
        // SAFETY: a prefetch faults for no address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(x.cast()) }
    }
}
