//! One stored row as numbers.

use baton_model_files::{TensorDtype, TensorView};
use half::f16;

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
        TensorDtype::Q4_0 | TensorDtype::Q4_1 | TensorDtype::Q8_0 => {
            let blocks = bytes.chunks_exact(view.dtype.block_bytes());
            for (block, out) in blocks.zip(out.as_chunks_mut::<32>().0) {
                widen_block(view.dtype, block, out);
            }
        }
    }
}

fn widen_block(dtype: TensorDtype, block: &[u8], out: &mut [f32; 32]) {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let scale = half(0);
    match dtype {
        TensorDtype::Q8_0 => {
            for (out, q) in out.iter_mut().zip(&block[2..]) {
                *out = scale * f32::from(*q as i8);
            }
        }
        TensorDtype::Q4_1 => {
            let minimum = half(2);
            for (i, q) in block[4..].iter().enumerate() {
                out[i] = scale.mul_add(f32::from(q & 15), minimum);
                out[i + 16] = scale.mul_add(f32::from(q >> 4), minimum);
            }
        }
        _ => {
            for (i, q) in block[2..].iter().enumerate() {
                out[i] = scale * (f32::from(q & 15) - 8.0);
                out[i + 16] = scale * (f32::from(q >> 4) - 8.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_model_files::RowOrder;

    use super::*;

    fn widen(dtype: TensorDtype, cols: usize, bytes: &[u8]) -> Vec<f32> {
        let view = TensorView { dtype, rows: 1, cols, row_order: RowOrder::Plain, bytes };
        let mut out = vec![0.0; cols];
        widen_row(&view, 0, &mut out);
        out
    }

    #[test]
    fn known_blocks() {
        let half = f16::from_f32(0.5).to_le_bytes();
        let minus_one = f16::from_f32(-1.0).to_le_bytes();
        let q4_0 = [&half[..], &[0xf0; 16]].concat();
        let out = widen(TensorDtype::Q4_0, 32, &q4_0);
        assert_eq!((out[0], out[15], out[16], out[31]), (-4.0, -4.0, 3.5, 3.5));
        let q4_1 = [&half[..], &minus_one, &[0x52; 16]].concat();
        let out = widen(TensorDtype::Q4_1, 32, &q4_1);
        assert_eq!((out[0], out[16]), (0.0, 1.5));
        let q8_0 = [&half[..], &[0x80; 32]].concat();
        assert_eq!(widen(TensorDtype::Q8_0, 32, &q8_0), [-64.0; 32]);
        assert_eq!(widen(TensorDtype::Bf16, 1, &[0x80, 0x3f]), [1.0]);
        assert_eq!(widen(TensorDtype::F16, 1, &half), [0.5]);
    }
}
