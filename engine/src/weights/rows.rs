//! One stored row as numbers.

use baton_model_files::{TensorDtype, TensorView};
use half::f16;

use super::stored::{IQ4_NL_VALUES, SMALL, SUPER, Scheme, SmallBlock, SuperBlock};
use crate::kernels::numerics::bf16_widen;

/// Widens row `row` of `view` into `out[cols]`.
///
/// # Panics
/// When `out` has another length than a row.
pub(crate) fn widen_row(view: &TensorView<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), view.cols);
    let bytes = view.row(row);
    match view.dtype {
        TensorDtype::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        TensorDtype::F16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        TensorDtype::Bf16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = bf16_widen(u16::from_le_bytes(*bytes));
            }
        }
        TensorDtype::Q2K
        | TensorDtype::Q3K
        | TensorDtype::Q4K
        | TensorDtype::Q5K
        | TensorDtype::Q6K => {
            let blocks = bytes.chunks_exact(view.dtype.block_bytes());
            for (block, out) in blocks.zip(out.as_chunks_mut().0) {
                widen_super(view.dtype, block, out);
            }
        }
        TensorDtype::Q4_0
        | TensorDtype::Q4_1
        | TensorDtype::Q5_0
        | TensorDtype::Q5_1
        | TensorDtype::Q8_0
        | TensorDtype::Iq4Nl => {
            let blocks = bytes.chunks_exact(view.dtype.block_bytes());
            for (block, out) in blocks.zip(out.as_chunks_mut().0) {
                widen_small(view.dtype, block, out);
            }
        }
    }
}

/// Products of a scale and a quant fit into 24 bits, so that only a minimum's sum rounds, once.
fn widen_small(dtype: TensorDtype, block: &[u8], out: &mut [f32; SMALL]) {
    let scheme = Scheme::of(dtype).expect("blocks of 32 have a scheme");
    let block = SmallBlock::read(dtype, block);
    let (scale, minimum) = (widen_half(block.scale), widen_half(block.minimum));
    for (out, q) in out.iter_mut().zip(block.quants) {
        let q = match dtype {
            TensorDtype::Iq4Nl => f32::from(IQ4_NL_VALUES[usize::from(q)]),
            _ => (i32::from(q) + scheme.zero) as f32,
        };
        *out = if scheme.has_minima { scale.mul_add(q, minimum) } else { scale * q };
    }
}

/// As `widen_small`, with scales and minima of 16 or 32 columns: exact products as well.
fn widen_super(dtype: TensorDtype, block: &[u8], out: &mut [f32; SUPER]) {
    let scheme = Scheme::of(dtype).expect("super-blocks have a scheme");
    let part_len = SMALL / scheme.parts.expect("super-blocks have parts");
    let block = SuperBlock::read(dtype, block);
    let (d, dmin) = (widen_half(block.d), widen_half(block.dmin));
    for (i, (out, q)) in out.iter_mut().zip(block.quants).enumerate() {
        let scale = d * f32::from(block.scales[i / part_len]);
        let q = (i32::from(q) + scheme.zero) as f32;
        let minimum = dmin * f32::from(block.minima[i / part_len]);
        *out = if scheme.has_minima { scale.mul_add(q, -minimum) } else { scale * q };
    }
}

fn widen_half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

#[cfg(test)]
mod tests;
