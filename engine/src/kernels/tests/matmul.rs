//! Products of every format.

use baton_model_files::{RowOrder, TensorDtype, TensorView};
use baton_types::Activation;
use half::f16;

use super::{Random, bits, kernels};
use crate::kernels::dispatch::Kernels;
use crate::kernels::matmul::{Epilogue, Input, Matmul, scratch_blocks};
use crate::kernels::quantize::QuantRows;
use crate::memory::Buffer;
use crate::simd::Isa;
use crate::weights::{PANEL_ROWS, PackedMatrix, widen_row};

/// Every format, and where its blocks keep f16 numbers, with their sizes.
const FORMATS: [(TensorDtype, &[(usize, f32)]); 14] = [
    (TensorDtype::Q4_0, &[(0, 0.1)]),
    (TensorDtype::Q4_1, &[(0, 0.1), (2, 1.0)]),
    (TensorDtype::Q5_0, &[(0, 0.1)]),
    (TensorDtype::Q5_1, &[(0, 0.1), (2, 1.0)]),
    (TensorDtype::Q8_0, &[(0, 0.1)]),
    (TensorDtype::Iq4Nl, &[(0, 0.1)]),
    (TensorDtype::Q2K, &[(80, 0.05), (82, 0.05)]),
    (TensorDtype::Q3K, &[(108, 0.01)]),
    (TensorDtype::Q4K, &[(0, 0.005), (2, 0.02)]),
    (TensorDtype::Q5K, &[(0, 0.005), (2, 0.02)]),
    (TensorDtype::Q6K, &[(208, 0.001)]),
    (TensorDtype::F16, &[]),
    (TensorDtype::Bf16, &[]),
    (TensorDtype::F32, &[]),
];
const EPILOGUES: [Epilogue; 6] = [
    Epilogue::Store,
    Epilogue::Add,
    Epilogue::Gate(Activation::Silu),
    Epilogue::Gate(Activation::GeluTanh),
    Epilogue::GateOnto(Activation::Silu),
    Epilogue::GateOnto(Activation::GeluTanh),
];
const ROWS: usize = 40;
const K: usize = 96;

/// Columns of a small matrix: for small blocks no multiple of 256, nor a whole panel of them.
fn columns(dtype: TensorDtype) -> usize {
    if dtype.block_len() == 256 { 512 } else { K }
}

/// Random stored weights of moderate size.
fn weights(dtype: TensorDtype, rows: usize, k: usize, random: &mut Random) -> Vec<u8> {
    let (_, halves) = FORMATS.iter().find(|(known, _)| *known == dtype).unwrap();
    let mut out = Vec::new();
    for _ in 0..rows * k / dtype.block_len() {
        match dtype {
            TensorDtype::F32 => out.extend(random.number().to_le_bytes()),
            TensorDtype::F16 => out.extend(f16::from_f32(random.number()).to_le_bytes()),
            TensorDtype::Bf16 => out.extend(half::bf16::from_f32(random.number()).to_le_bytes()),
            _ => {
                let start = out.len();
                out.extend((0..dtype.block_bytes()).map(|_| random.bits() as u8));
                for &(at, size) in *halves {
                    let half = f16::from_f32(random.number() * size).to_le_bytes();
                    out[start + at..][..2].copy_from_slice(&half);
                }
            }
        }
    }
    out
}

fn view(dtype: TensorDtype, rows: usize, cols: usize, bytes: &[u8]) -> TensorView<'_> {
    TensorView { dtype, rows, cols, row_order: RowOrder::Plain, bytes }
}

/// `x[rows][K] · wᵀ`, onto `start` in every output.
fn product(
    kernels: &Kernels,
    weights: &PackedMatrix,
    x: &[f32],
    epilogue: Epilogue,
    start: f32,
) -> Vec<f32> {
    let k = weights.k();
    let rows = x.len() / k;
    let stride = weights.panels() * PANEL_ROWS;
    let mut floats = Buffer::zeroed(x.len()).unwrap();
    floats.copy_from_slice(x);
    let mut quants = QuantRows::new(rows, k).unwrap();
    let quants = quants.view(rows, k);
    let mut scratch = Buffer::zeroed(scratch_blocks(k)).unwrap();
    let mut out = vec![start; rows * stride];
    for (row, x) in x.chunks_exact(k).enumerate() {
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
        scratch: scratch.parts(),
    };
    // SAFETY: one thread.
    unsafe { (kernels.matmul)(&job) };
    out
}

#[test]
fn all_instruction_sets_and_row_counts_agree() {
    let mut random = Random(11);
    for (dtype, _) in FORMATS {
        let k = columns(dtype);
        let bytes = weights(dtype, ROWS, k, &mut random);
        let packed = PackedMatrix::pack(&[view(dtype, ROWS, k, &bytes)], 2).unwrap();
        for rows in [1, 2, 3, 7, 8, 13, 17, 23, 24, 25, 31] {
            let x: Vec<f32> = random.numbers(rows * k).iter().map(|x| x * 5.0).collect();
            for epilogue in EPILOGUES {
                let want = product(&Kernels::plain_scalar(), &packed, &x, epilogue, 0.25);
                for kernels in kernels() {
                    let got = product(&kernels, &packed, &x, epilogue, 0.25);
                    assert_eq!(bits(&got), bits(&want), "{dtype:?} {rows} {:?}", kernels.isa);
                    let alone: Vec<f32> = x
                        .chunks_exact(k)
                        .flat_map(|x| product(&kernels, &packed, x, epilogue, 0.25))
                        .collect();
                    assert_eq!(bits(&alone), bits(&want), "{dtype:?} {rows} one by one");
                }
            }
        }
    }
}

#[test]
fn random_shapes_agree() {
    let mut random = Random(23);
    for _ in 0..6 {
        for (dtype, _) in FORMATS {
            let blocks = if dtype.block_len() == 256 { 4 } else { 11 };
            let k = dtype.block_len().max(32) * (1 + random.below(blocks));
            let (rows, tokens) = (1 + random.below(70), 1 + random.below(10));
            let bytes = weights(dtype, rows, k, &mut random);
            let packed = PackedMatrix::pack(&[view(dtype, rows, k, &bytes)], 2).unwrap();
            let x = random.numbers(tokens * k);
            let want = product(&Kernels::plain_scalar(), &packed, &x, Epilogue::Store, 0.0);
            let stride = packed.panels() * PANEL_ROWS;
            for got in want.chunks_exact(stride) {
                assert!(got[rows..].iter().all(|x| *x == 0.0), "{dtype:?}: rows past the last");
            }
            for kernels in kernels() {
                let got = product(&kernels, &packed, &x, Epilogue::Store, 0.0);
                let isa = kernels.isa;
                assert_eq!(bits(&got), bits(&want), "{dtype:?} {isa:?} [{rows}, {k}] x {tokens}");
            }
        }
    }
}

/// A token that is 127 in one column and 0 elsewhere is exact as bytes, and so shows one column's
/// weights, times 127: they must be the file's, not an approximation.
#[test]
fn no_weight_loses_precision() {
    let mut random = Random(31);
    let kernels = Kernels::new(Isa::detect());
    for (dtype, _) in FORMATS {
        let k = columns(dtype);
        let bytes = weights(dtype, ROWS, k, &mut random);
        let view = view(dtype, ROWS, k, &bytes);
        let packed = PackedMatrix::pack(&[view], 1).unwrap();
        let mut x = vec![0.0; k * k];
        for column in 0..k {
            x[column * k + column] = 127.0;
        }
        let got = product(&kernels, &packed, &x, Epilogue::Store, 0.0);
        let stride = packed.panels() * PANEL_ROWS;
        let mut row = vec![0.0; k];
        for n in 0..ROWS {
            widen_row(&view, n, &mut row);
            let largest = row.iter().fold(0.0f32, |max, w| max.max(w.abs()));
            for (column, w) in row.iter().enumerate() {
                let (got, want) = (got[column * stride + n], 127.0 * w);
                // Two roundings, one before a minimum is added.
                let bound = 127.0 * 2.0 * largest * f32::EPSILON;
                assert!((got - want).abs() <= bound, "{dtype:?} [{n}, {column}] {got} {want}");
            }
        }
    }
}

#[test]
fn scalar_is_close_to_f64() {
    let mut random = Random(5);
    for (dtype, _) in FORMATS {
        let k = columns(dtype);
        let bytes = weights(dtype, ROWS, k, &mut random);
        let view = view(dtype, ROWS, k, &bytes);
        let packed = PackedMatrix::pack(&[view], 1).unwrap();
        let x = random.numbers(3 * k);
        let got = product(&Kernels::plain_scalar(), &packed, &x, Epilogue::Store, 0.0);
        // Quantised activations are off by up to half a step of max / 127 in each of K products.
        let step = if dtype.is_quantized() { 0.5 / 127.0 } else { 1e-6 };
        let stride = packed.panels() * PANEL_ROWS;
        for (row, x) in x.chunks_exact(k).enumerate() {
            for n in 0..stride {
                let mut w = vec![0.0; k];
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
fn silu_in_one_product_or_in_two() {
    let mut random = Random(37);
    let kernels = Kernels::new(Isa::detect());
    for (dtype, _) in FORMATS {
        let k = columns(dtype);
        let (a, b) = (weights(dtype, 32, k, &mut random), weights(dtype, 32, k, &mut random));
        let (a, b) = (view(dtype, 32, k, &a), view(dtype, 32, k, &b));
        let x = random.numbers(k);
        let paired = PackedMatrix::pack_paired(&a, &b, 1).unwrap();
        let want = product(&kernels, &paired, &x, Epilogue::Gate(Activation::Silu), 0.0);
        let [a, b] = [a, b].map(|part| PackedMatrix::pack(&[part], 1).unwrap());
        let gate = product(&kernels, &a, &x, Epilogue::Store, 0.0);
        // `product` starts with one number everywhere: one gate at a time.
        for (column, gate) in gate.iter().enumerate() {
            let got = product(&kernels, &b, &x, Epilogue::GateOnto(Activation::Silu), *gate);
            assert_eq!(got[column].to_bits(), want[column].to_bits(), "{dtype:?} {column}");
        }
    }
}

#[test]
fn stacked_and_paired_rows_lie_where_they_should() {
    let mut random = Random(3);
    let dtype = TensorDtype::Q8_0;
    let (a, b) = (weights(dtype, 32, K, &mut random), weights(dtype, 32, K, &mut random));
    let (a, b) = (view(dtype, 32, K, &a), view(dtype, 32, K, &b));
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
    for (dtype, _) in FORMATS {
        let k = columns(dtype);
        let bytes = weights(dtype, 32, k, &mut random);
        let packed = PackedMatrix::pack(&[view(dtype, 32, k, &bytes)], 1).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = random.numbers(2 * k);
            x[5] = bad;
            for kernels in kernels() {
                let out = product(&kernels, &packed, &x, Epilogue::Store, 0.0);
                assert!(out[..32].iter().all(|x| !x.is_finite()), "{dtype:?} {:?}", kernels.isa);
                assert!(out[32..].iter().all(|x| x.is_finite()), "{dtype:?} {:?}", kernels.isa);
            }
        }
    }
}
