//! All kernels of one instruction set, chosen once at start.

use super::attention::{self, Chunk, Partial, format};
use super::burn;
use super::matmul::{self, Matmul};
use super::norm;
use super::quantize::{self, QuantView};
use super::rope::{self, Angles};
use crate::simd::Isa;

/// One row to normalise: `x[K]`, `weight[K]` → `out[K]`.
pub(crate) struct Norm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

/// Heads of one token to normalise in place: `heads[heads][K]`, `weight[K]`.
pub(crate) struct NormHeads<'a> {
    pub(crate) heads: &'a mut [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
}

/// Heads of one token to rotate in place.
pub(crate) struct Rotate<'a> {
    pub(crate) angles: Angles<'a>,
    /// `[heads][head_dim]`
    pub(crate) heads: &'a mut [f32],
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
}

/// Attention over two sets of keys, the second after the first, to join in the first.
pub(crate) struct Merge<'a> {
    pub(crate) state: &'a mut Partial,
    pub(crate) later: &'a Partial,
    pub(crate) rows: usize,
    pub(crate) dim: usize,
}

/// Entry points. Each is unsafe for the reasons of the kernel that it names.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    pub(crate) isa: Isa,
    pub(crate) norm: unsafe fn(&mut Norm<'_>),
    /// Adds what `norm` would store.
    pub(crate) add_norm: unsafe fn(&mut Norm<'_>),
    pub(crate) norm_heads: unsafe fn(&mut NormHeads<'_>),
    pub(crate) quantize: unsafe fn(&[f32], &QuantView<'_>, usize),
    pub(crate) matmul: unsafe fn(&Matmul<'_>),
    pub(crate) rotate: unsafe fn(&mut Rotate<'_>),
    pub(crate) attend_bf16: unsafe fn(&mut Chunk<'_>),
    pub(crate) attend_int8: unsafe fn(&mut Chunk<'_>),
    pub(crate) attend_int4: unsafe fn(&mut Chunk<'_>),
    pub(crate) merge: unsafe fn(&mut Merge<'_>),
    /// Rounds of nothing but dots.
    pub(crate) burn_dots: unsafe fn(usize) -> i32,
    /// Rounds of nothing but fused multiply-adds.
    pub(crate) burn_floats: unsafe fn(usize) -> f32,
    /// Nothing but reads.
    pub(crate) read: unsafe fn(&[u8]) -> i32,
}

impl Kernels {
    /// # Panics
    /// When this processor does not have `isa`: the caller's bug.
    pub(crate) fn new(isa: Isa) -> Self {
        assert!(isa.is_available(), "{} is not available here", isa.as_str());
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Scalar if Isa::Avx2.is_available() => scalar_fused::KERNELS,
            Isa::Scalar => scalar::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::KERNELS,
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("asserted to be available"),
        }
    }

    /// Scalar as every processor can do it, whatever this one has.
    #[cfg(test)]
    pub(crate) fn plain_scalar() -> Self {
        scalar::KERNELS
    }
}

/// Instantiates every kernel for one instruction set.
///
/// Each entry is only reached through `Kernels::new`, which asserts that the processor has the
/// instructions: that is what the token of `$lanes` proves.
macro_rules! instantiate {
    ($module:ident, $isa:expr, $lanes:ty $(, $features:literal)?) => {
        mod $module {
            use super::*;

            pub(super) const KERNELS: Kernels = Kernels {
                isa: $isa,
                norm,
                add_norm,
                norm_heads,
                quantize,
                matmul,
                rotate,
                attend_bf16,
                attend_int8,
                attend_int4,
                merge,
                burn_dots,
                burn_floats,
                read,
            };

            $(#[target_feature(enable = $features)])?
            unsafe fn norm(job: &mut Norm<'_>) {
                // SAFETY: see the macro.
                let l = unsafe { <$lanes>::new() };
                norm::rms_norm(l, job.x, job.weight, job.eps, job.out);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn add_norm(job: &mut Norm<'_>) {
                // SAFETY: see the macro.
                let l = unsafe { <$lanes>::new() };
                norm::add_rms_norm(l, job.x, job.weight, job.eps, job.out);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn norm_heads(job: &mut NormHeads<'_>) {
                // SAFETY: see the macro.
                let l = unsafe { <$lanes>::new() };
                norm::norm_heads(l, job.heads, job.weight, job.eps);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn quantize(x: &[f32], out: &QuantView<'_>, row: usize) {
                // SAFETY: see the macro; the row is the caller's promise.
                unsafe { quantize::quantize(<$lanes>::new(), x, out, row) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn matmul(job: &Matmul<'_>) {
                // SAFETY: see the macro; the rest is the caller's promise.
                unsafe { matmul::matmul(<$lanes>::new(), job) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn rotate(job: &mut Rotate<'_>) {
                rope::rotate(job.angles, job.heads, job.head_dim, job.scale);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn attend_bf16(chunk: &mut Chunk<'_>) {
                // SAFETY: see the macro; the tiles are the caller's promise.
                unsafe { attention::attend::<_, format::Bf16>(<$lanes>::new(), chunk) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn attend_int8(chunk: &mut Chunk<'_>) {
                // SAFETY: see the macro; the tiles are the caller's promise.
                unsafe { attention::attend::<_, format::Int8>(<$lanes>::new(), chunk) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn attend_int4(chunk: &mut Chunk<'_>) {
                // SAFETY: see the macro; the tiles are the caller's promise.
                unsafe { attention::attend::<_, format::Int4>(<$lanes>::new(), chunk) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn merge(job: &mut Merge<'_>) {
                // SAFETY: see the macro.
                let l = unsafe { <$lanes>::new() };
                attention::merge(l, job.state, job.later, job.rows, job.dim);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn burn_dots(rounds: usize) -> i32 {
                // SAFETY: see the macro.
                burn::dots(unsafe { <$lanes>::new() }, rounds)
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn burn_floats(rounds: usize) -> f32 {
                // SAFETY: see the macro.
                burn::floats(unsafe { <$lanes>::new() }, rounds)
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn read(bytes: &[u8]) -> i32 {
                // SAFETY: see the macro.
                burn::read(unsafe { <$lanes>::new() }, bytes)
            }
        }
    };
}

instantiate!(scalar, Isa::Scalar, crate::simd::scalar::Scalar);
// The same source where a fused multiply-add is an instruction and not a call: the same bits,
// sooner.
#[cfg(target_arch = "x86_64")]
instantiate!(scalar_fused, Isa::Scalar, crate::simd::scalar::Scalar, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
instantiate!(avx2, Isa::Avx2, crate::simd::avx2::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
instantiate!(
    avx512,
    Isa::Avx512,
    crate::simd::avx512::Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);
