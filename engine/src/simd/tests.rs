//! Every operation of every instruction set against the specification, bit for bit.

use super::scalar::Scalar;
use super::{Isa, LANES, Lanes};

/// Xorshift: the same numbers everywhere.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    /// Mostly moderate numbers, some huge, tiny, infinite or zero.
    fn number(&mut self) -> f32 {
        let x = (self.bits() as i32 as f32) / 2f32.powi(31);
        match self.bits() % 16 {
            0 => 0.0,
            1 => x * 1e30,
            2 => x * 1e-30,
            3 => f32::INFINITY.copysign(x),
            _ => x * 100.0,
        }
    }

    fn numbers(&mut self) -> [f32; LANES] {
        std::array::from_fn(|_| self.number())
    }

    fn small(&mut self) -> [f32; LANES] {
        std::array::from_fn(|_| (self.bits() as i32 as f32) / 2f32.powi(24))
    }
}

fn floats<L: Lanes>(l: L, x: L::F) -> [u32; LANES] {
    let mut out = [0.0; LANES];
    l.store(x, &mut out);
    // All NaNs are one: which of its operands an instruction keeps is not specified.
    out.map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() })
}

fn one(x: f32) -> u32 {
    if x.is_nan() { u32::MAX } else { x.to_bits() }
}

/// The lanes of an integer register, through the float unit of the same width.
fn ints<L: Lanes>(l: L, x: L::I) -> ([u32; LANES], i32, i32) {
    (floats(l, l.to_float(x)), l.reduce_add_i(x), l.reduce_max_i(x))
}

/// All results of one round of random inputs.
fn round<L: Lanes>(l: L, seed: u64) -> Vec<[u32; LANES]> {
    let mut r = Random(seed);
    let (a, b, c) = (r.numbers(), r.numbers(), r.numbers());
    let (va, vb, vc) = (l.load(&a), l.load(&b), l.load(&c));
    let count = r.bits() as usize % 18;
    let halves: [u16; LANES] = std::array::from_fn(|_| r.bits() as u16);
    let words: [u32; LANES] = std::array::from_fn(|_| r.bits());
    let bytes: [u8; 64] = std::array::from_fn(|_| r.bits() as u8);
    let activations = i32::from_le_bytes(std::array::from_fn(|_| (r.bits() % 255) as u8 ^ 0x81));
    let activations =
        i32::from_le_bytes(activations.to_le_bytes().map(|b| if b == 0x80 { 0 } else { b }));
    let small = l.load(&r.small());
    let mut out = vec![
        floats(l, l.add(va, vb)),
        floats(l, l.sub(va, vb)),
        floats(l, l.mul(va, vb)),
        floats(l, l.div(va, vb)),
        floats(l, l.fma(va, vb, vc)),
        floats(l, l.max(va, vb)),
        floats(l, l.min(va, vb)),
        floats(l, l.keep_first(count, va, vb)),
        floats(l, l.load_f16(&halves)),
        floats(l, l.load_bf16(&halves)),
        floats(l, l.low_bf16(l.load_i(&words))),
        floats(l, l.high_bf16(l.load_i(&words))),
        floats(l, crate::kernels::numerics::exp2_lanes(l, small)),
        floats(l, crate::kernels::numerics::silu_mul(l, small, va)),
        [one(l.reduce_add(va)); LANES],
        [one(l.reduce_max(va)); LANES],
    ];
    let sum: i32 = activations.to_le_bytes().iter().map(|b| i32::from(*b as i8)).sum();
    let w = l.load_bytes(&bytes);
    let table: [u8; 16] = std::array::from_fn(|_| r.bits() as u8);
    let signed: [u8; LANES] = std::array::from_fn(|_| r.bits() as u8);
    let start = l.splat_i(sum * L::BYTES_START);
    for (lanes, add, max) in [
        ints(l, l.round(small)),
        ints(l, l.abs_bits(va)),
        ints(l, l.max_i(l.load_i(&words), w)),
        ints(l, l.dot_small(l.splat_i(7), l.low_nibbles(w), activations)),
        ints(l, l.dot_small(l.splat_i(-7), l.high_nibbles(w), activations)),
        ints(l, l.dot_small(l.splat_i(3), l.bits(w, 0, 0x7f), activations)),
        ints(l, l.bits(w, 3, 0x1f)),
        ints(l, l.bits(w, 7, 0x01)),
        ints(l, l.bits(w, -2, 0xfc)),
        ints(l, l.bits(w, -4, 0x10)),
        ints(l, l.or(l.low_nibbles(w), l.bits(w, -1, 0x30))),
        ints(l, l.look_up(&table, l.low_nibbles(w))),
        ints(l, l.load_signed(&signed)),
        ints(l, l.load_nibbles(&signed.as_chunks().0[1])),
        ints(l, l.dot_bytes(start, w, activations)),
    ] {
        out.push(lanes);
        out.push([add as u32; LANES]);
        out.push([max as u32; LANES]);
    }
    let mut stored = [0i8; LANES];
    l.store_bytes(l.round(l.max(l.splat(-127.0), l.min(l.splat(127.0), small))), &mut stored);
    out.push(stored.map(|b| b as u32));
    out
}

fn agrees<L: Lanes>(l: L) {
    for seed in 1..3000 {
        let (got, want) = (round(l, seed * 7919), round(Scalar, seed * 7919));
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got, want, "operation {index}, seed {seed}");
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn avx2_is_scalar() {
    if Isa::Avx2.is_available() {
        // SAFETY: it is available.
        agrees(unsafe { super::avx2::Avx2::new() });
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn avx512_is_scalar() {
    if Isa::Avx512.is_available() {
        // SAFETY: it is available.
        agrees(unsafe { super::avx512::Avx512::new() });
    }
}
