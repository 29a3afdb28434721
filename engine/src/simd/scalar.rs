//! The specification: plain Rust, lane by lane.

use super::{LANES, Lanes};

/// Proof of nothing: every processor can do this.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

impl Scalar {
    /// # Safety
    /// None needed; unsafe for the sake of the others.
    pub(crate) unsafe fn new() -> Self {
        Self
    }
}

/// 1.5 * 2^23: a number added to it is rounded to an integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

#[inline(always)]
fn each<T: Copy, U: Copy + Default>(x: [T; LANES], f: impl Fn(T) -> U) -> [U; LANES] {
    let mut out = [U::default(); LANES];
    for i in 0..LANES {
        out[i] = f(x[i]);
    }
    out
}

#[inline(always)]
fn zip<T: Copy + Default>(a: [T; LANES], b: [T; LANES], f: impl Fn(T, T) -> T) -> [T; LANES] {
    let mut out = [T::default(); LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
fn tree<T: Copy>(mut x: [T; LANES], f: impl Fn(T, T) -> T) -> T {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            x[i] = f(x[i], x[i + half]);
        }
    }
    x[0]
}

#[inline(always)]
fn dot(acc: [u32; LANES], w: [u32; LANES], a: i32, bias: i32) -> [u32; LANES] {
    let a = a.to_le_bytes();
    zip(acc, w, |acc, w| {
        let w = w.to_le_bytes();
        let mut sum = acc as i32;
        for j in 0..4 {
            sum += (i32::from(w[j]) - bias) * i32::from(a[j] as i8);
        }
        sum as u32
    })
}

impl Lanes for Scalar {
    type F = [f32; LANES];
    type I = [u32; LANES];
    const MANY_REGISTERS: bool = false;
    const TILES: bool = false;
    const BYTES_START: i32 = 0;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        [x as u32; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        *x
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        *to = x;
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        each(*x, |bits| half::f16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        each(*x, |bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn load_i(self, x: &[u32; LANES]) -> Self::I {
        *x
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = c;
        for i in 0..LANES {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn keep_first(self, count: usize, a: Self::F, b: Self::F) -> Self::F {
        let mut out = b;
        for i in 0..LANES {
            if i < count {
                out[i] = a[i];
            }
        }
        out
    }

    #[inline(always)]
    fn reduce_add(self, x: Self::F) -> f32 {
        tree(x, |a, b| a + b)
    }

    #[inline(always)]
    fn reduce_max(self, x: Self::F) -> f32 {
        tree(x, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn round(self, x: Self::F) -> Self::I {
        each(x, |x| {
            let rounded = (x + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
            if x.is_nan() { i32::MIN as u32 } else { rounded }
        })
    }

    #[inline(always)]
    fn to_float(self, x: Self::I) -> Self::F {
        each(x, |x| x as i32 as f32)
    }

    #[inline(always)]
    fn scale_exponent(self, x: Self::F, n: Self::I) -> Self::F {
        let mut out = x;
        for i in 0..LANES {
            out[i] = f32::from_bits(x[i].to_bits().wrapping_add(n[i] << 23));
        }
        out
    }

    #[inline(always)]
    fn abs_bits(self, x: Self::F) -> Self::I {
        each(x, |x| x.to_bits() & 0x7fff_ffff)
    }

    #[inline(always)]
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, |a, b| (a as i32).max(b as i32) as u32)
    }

    #[inline(always)]
    fn reduce_add_i(self, x: Self::I) -> i32 {
        tree(x, u32::wrapping_add) as i32
    }

    #[inline(always)]
    fn reduce_max_i(self, x: Self::I) -> i32 {
        tree(x, |a, b| (a as i32).max(b as i32) as u32) as i32
    }

    #[inline(always)]
    fn store_bytes(self, x: Self::I, to: &mut [i8; LANES]) {
        *to = each(x, |x| x as i8);
    }

    #[inline(always)]
    fn low_bf16(self, x: Self::I) -> Self::F {
        each(x, |x| f32::from_bits(x << 16))
    }

    #[inline(always)]
    fn high_bf16(self, x: Self::I) -> Self::F {
        each(x, |x| f32::from_bits(x & 0xffff_0000))
    }

    #[inline(always)]
    fn store_quads(self, x: Self::I, to: &mut [u8; 4 * LANES]) {
        for (bytes, lane) in to.as_chunks_mut().0.iter_mut().zip(x) {
            *bytes = lane.to_le_bytes();
        }
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::I {
        let mut out = [0; LANES];
        for (lane, bytes) in out.iter_mut().zip(x.as_chunks().0) {
            *lane = u32::from_le_bytes(*bytes);
        }
        out
    }

    #[inline(always)]
    fn low_nibbles(self, x: Self::I) -> Self::I {
        each(x, |x| x & 0x0f0f_0f0f)
    }

    #[inline(always)]
    fn high_nibbles(self, x: Self::I) -> Self::I {
        each(x, |x| (x >> 4) & 0x0f0f_0f0f)
    }

    #[inline(always)]
    fn bits(self, x: Self::I, down: i32, mask: u8) -> Self::I {
        let mask = u32::from(mask) * 0x0101_0101;
        each(x, |x| if down >= 0 { (x >> down) & mask } else { (x << -down) & mask })
    }

    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], x: Self::I) -> Self::I {
        each(x, |x| u32::from_le_bytes(x.to_le_bytes().map(|index| table[usize::from(index & 15)])))
    }

    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES / 2]) -> Self::I {
        std::array::from_fn(|i| u32::from(x[i % 8] >> (i / 8 * 4) & 15))
    }

    #[inline(always)]
    fn load_signed(self, x: &[u8; LANES]) -> Self::I {
        each(*x, |x| i32::from(x as i8) as u32)
    }

    #[inline(always)]
    fn dot_small(self, acc: Self::I, w: Self::I, a: i32) -> Self::I {
        dot(acc, w, a, 0)
    }

    #[inline(always)]
    fn dot_bytes(self, acc: Self::I, w: Self::I, a: i32) -> Self::I {
        dot(acc, w, a, 128)
    }

    #[inline(always)]
    fn prefetch(self, _x: *const u8) {}
}
