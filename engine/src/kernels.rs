//! The arithmetic of the forward pass. Each kernel is written once over `simd::Lanes`;
//! `dispatch` instantiates all of them for each instruction set.
//!
//! The numerics contract (docs/numerics.md) lives here: each output element is one chain of
//! operations whose order depends on absolute positions only, never on how many rows, threads or
//! pages there are.

// Kernels index several register arrays by one counter.
#![allow(clippy::needless_range_loop)]

pub(crate) mod attention;
pub(crate) mod burn;
pub(crate) mod dispatch;
pub(crate) mod experts;
pub(crate) mod hadamard;
pub(crate) mod matmul;
pub(crate) mod norm;
pub mod numerics;
pub(crate) mod quantize;
pub(crate) mod rope;
#[cfg(test)]
mod tests;
