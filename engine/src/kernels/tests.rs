//! Every kernel of every instruction set against scalar, bit for bit, and scalar against f64.

mod attention;
mod matmul;
mod rows;
mod streaming;

use super::dispatch::Kernels;
use crate::simd::Isa;

/// Xorshift: the same numbers everywhere.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Between -1 and 1.
    pub(super) fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(super) fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        self.bits() as usize % end
    }
}

/// The specification first.
pub(super) fn kernels() -> impl Iterator<Item = Kernels> {
    let isas = [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.is_available());
    std::iter::once(Kernels::plain_scalar()).chain(isas.map(Kernels::new))
}

pub(super) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
