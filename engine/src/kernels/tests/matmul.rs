//! Products of every format.

use baton_model_files::{RowOrder, TensorDtype, TensorView};
use half::f16;

use super::{Random, bits, kernels};
use crate::kernels::dispatch::Kernels;
use crate::kernels::matmul::{Epilogue, Input, Matmul};
use crate::kernels::quantize::QuantRows;
use crate::memory::Buffer;
use crate::simd::Isa;
use crate::weights::{PANEL_ROWS, PackedMatrix, widen_row};

const FORMATS: [TensorDtype; 6] = [
    TensorDtype::Q4_0,
    TensorDtype::Q4_1,
    TensorDtype::Q8_0,
    TensorDtype::F16,
    TensorDtype::Bf16,
    TensorDtype::F32,
];
const EPILOGUES: [Epilogue; 4] =
    [Epilogue::Store, Epilogue::Add, Epilogue::SiluMul, Epilogue::GeluMul];
const ROWS: usize = 40;
const K: usize = 96;

/// Random stored weights of moderate size.
fn weights(dtype: TensorDtype, rows: usize, k: usize, random: &mut Random) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..rows * k / dtype.block_len() {
        let x = random.number();
        let half = |x: f32| f16::from_f32(x).to_le_bytes();
        match dtype {
            TensorDtype::F32 => out.extend(x.to_le_bytes()),
            TensorDtype::F16 => out.extend(half(x)),
            TensorDtype::Bf16 => out.extend(half::bf16::from_f32(x).to_le_bytes()),
            _ => {
                out.extend(half(x * 0.1));
                if dtype == TensorDtype::Q4_1 {
                    out.extend(half(random.number()));
                }
                let header = if dtype == TensorDtype::Q4_1 { 4 } else { 2 };
                out.extend((header..dtype.block_bytes()).map(|_| random.bits() as u8));
            }
        }
    }
    out
}

fn view(dtype: TensorDtype, rows: usize, bytes: &[u8]) -> TensorView<'_> {
    TensorView { dtype, rows, cols: K, row_order: RowOrder::Plain, bytes }
}

/// `x[rows][K] · wᵀ`, onto `start` in every output.
fn product(
    kernels: &Kernels,
    weights: &PackedMatrix,
    x: &[f32],
    epilogue: Epilogue,
    start: f32,
) -> Vec<f32> {
    let rows = x.len() / K;
    let stride = weights.panels() * PANEL_ROWS;
    let mut floats = Buffer::zeroed(x.len()).unwrap();
    floats.copy_from_slice(x);
    let mut quants = QuantRows::new(rows, K).unwrap();
    let quants = quants.view(rows, K);
    let mut out = vec![start; rows * stride];
    for (row, x) in x.chunks_exact(K).enumerate() {
        // SAFETY: one thread.
        unsafe { (kernels.quantize)(x, &quants, row) };
    }
    let job = Matmul {
        weights,
        input: Input { floats: floats.parts(), quants },
        rows,
        panels: 0..weights.panels(),
        out: crate::memory::Parts::new(&mut out),
        stride,
        column: 0,
        epilogue,
    };
    // SAFETY: one thread.
    unsafe { (kernels.matmul)(&job) };
    out
}

#[test]
fn all_instruction_sets_and_row_counts_agree() {
    let mut random = Random(11);
    for dtype in FORMATS {
        let bytes = weights(dtype, ROWS, K, &mut random);
        let packed = PackedMatrix::pack(&[view(dtype, ROWS, &bytes)], 2).unwrap();
        for rows in [1, 2, 3, 7, 8, 13, 17] {
            let x: Vec<f32> = random.numbers(rows * K).iter().map(|x| x * 5.0).collect();
            for epilogue in EPILOGUES {
                let want = product(&Kernels::plain_scalar(), &packed, &x, epilogue, 0.25);
                for kernels in kernels() {
                    let got = product(&kernels, &packed, &x, epilogue, 0.25);
                    assert_eq!(bits(&got), bits(&want), "{dtype:?} {rows} {:?}", kernels.isa);
                    let alone: Vec<f32> = x
                        .chunks_exact(K)
                        .flat_map(|x| product(&kernels, &packed, x, epilogue, 0.25))
                        .collect();
                    assert_eq!(bits(&alone), bits(&want), "{dtype:?} {rows} one by one");
                }
            }
        }
    }
}

#[test]
fn scalar_is_close_to_f64() {
    let mut random = Random(5);
    for dtype in FORMATS {
        let bytes = weights(dtype, ROWS, K, &mut random);
        let view = view(dtype, ROWS, &bytes);
        let packed = PackedMatrix::pack(&[view], 1).unwrap();
        let x = random.numbers(3 * K);
        let got = product(&Kernels::plain_scalar(), &packed, &x, Epilogue::Store, 0.0);
        // Quantised activations are off by up to half a step of max / 127 in each of K products.
        let step = if dtype.block_len() == 32 { 0.5 / 127.0 } else { 1e-6 };
        let stride = packed.panels() * PANEL_ROWS;
        for (row, x) in x.chunks_exact(K).enumerate() {
            for n in 0..stride {
                let mut w = vec![0.0; K];
                if n < ROWS {
                    widen_row(&view, n, &mut w);
                }
                let want: f64 = x.iter().zip(&w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                let bound: f64 = w.iter().map(|w| f64::from(w.abs()) * step).sum();
                let got = f64::from(got[row * stride + n]);
                assert!((got - want).abs() <= bound + 1e-5, "{dtype:?} {got} {want} {bound}");
            }
        }
    }
}

#[test]
fn stacked_and_paired_rows_lie_where_they_should() {
    let mut random = Random(3);
    let dtype = TensorDtype::Q8_0;
    let (a, b) = (weights(dtype, 32, K, &mut random), weights(dtype, 32, K, &mut random));
    let (a, b) = (view(dtype, 32, &a), view(dtype, 32, &b));
    let x = random.numbers(K);
    let kernels = Kernels::new(Isa::detect());
    let one = |w: &PackedMatrix| product(&kernels, w, &x, Epilogue::Store, 0.0);
    let pack = |parts: &[TensorView<'_>]| PackedMatrix::pack(parts, 1).unwrap();
    let (alone_a, alone_b) = (one(&pack(&[a])), one(&pack(&[b])));
    assert_eq!(one(&pack(&[a, b])), [alone_a.clone(), alone_b.clone()].concat());
    let paired = one(&PackedMatrix::pack_paired(&a, &b, 1).unwrap());
    let want = [&alone_a[..16], &alone_b[..16], &alone_a[16..], &alone_b[16..]].concat();
    assert_eq!(paired, want);
}

#[test]
fn nan_and_infinity_show() {
    let mut random = Random(9);
    for dtype in FORMATS {
        let bytes = weights(dtype, 32, K, &mut random);
        let packed = PackedMatrix::pack(&[view(dtype, 32, &bytes)], 1).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = random.numbers(2 * K);
            x[5] = bad;
            for kernels in kernels() {
                let out = product(&kernels, &packed, &x, Epilogue::Store, 0.0);
                assert!(out[..32].iter().all(|x| !x.is_finite()), "{dtype:?} {:?}", kernels.isa);
                assert!(out[32..].iter().all(|x| x.is_finite()), "{dtype:?} {:?}", kernels.isa);
            }
        }
    }
}
