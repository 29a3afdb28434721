//! Kernels that work on one row.

use baton_types::{RopeScaling, RopeSpec};

use super::{Random, bits, kernels};
use crate::kernels::dispatch::{Norm, NormHeads, Rotate};
use crate::kernels::numerics;
use crate::kernels::rope::RopeTable;
use crate::simd::scalar::Scalar;
use crate::simd::{LANES, Lanes};

#[test]
fn norm_agrees_and_is_right() {
    let mut random = Random(21);
    for len in [32, 64, 576] {
        let (x, weight) = (random.numbers(len), random.numbers(len));
        let mut results = Vec::new();
        for kernels in kernels() {
            let mut out = vec![0.0; len];
            let mut job = Norm { x: &x, weight: &weight, eps: 1e-5, out: &mut out };
            // SAFETY: the instructions are available.
            unsafe { (kernels.norm)(&mut job) };
            results.push(bits(&out));
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / len as f64;
            for i in 0..len {
                let want = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                assert!((f64::from(out[i]) - want).abs() < 1e-5);
            }
        }
        assert!(results.iter().all(|r| *r == results[0]));
    }
}

#[test]
fn added_norms_and_norms_of_heads_are_the_norm() {
    let mut random = Random(23);
    for len in [16, 64, 576] {
        let (x, weight) = (random.numbers(3 * len), random.numbers(len));
        for kernels in kernels() {
            let (mut heads, eps) = (x.clone(), 1e-6);
            let mut job = NormHeads { heads: &mut heads, weight: &weight, eps };
            // SAFETY: the instructions are available.
            unsafe { (kernels.norm_heads)(&mut job) };
            for (x, got) in x.chunks_exact(len).zip(heads.chunks_exact(len)) {
                let mut want = vec![0.0; len];
                // SAFETY: the instructions are available.
                unsafe { (kernels.norm)(&mut Norm { x, weight: &weight, eps, out: &mut want }) };
                assert_eq!(bits(got), bits(&want));
                let mut sum = vec![0.25; len];
                // SAFETY: the instructions are available.
                unsafe { (kernels.add_norm)(&mut Norm { x, weight: &weight, eps, out: &mut sum }) };
                let want: Vec<f32> = want.iter().map(|x| 0.25 + x).collect();
                assert_eq!(bits(&sum), bits(&want));
            }
        }
    }
}

#[test]
fn gelu_is_close_to_f64() {
    let mut worst = 0.0f64;
    for i in -1000..1000 {
        let gate = [i as f32 * 0.01; LANES];
        // SAFETY: scalar needs no instructions.
        let l = unsafe { Scalar::new() };
        let mut out = [0.0; LANES];
        l.store(numerics::gelu_mul(l, l.load(&gate), l.splat(2.0)), &mut out);
        let x = f64::from(gate[0]);
        let y = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
        worst = worst.max((f64::from(out[0]) - x * (1.0 + libm::tanh(y))).abs());
    }
    assert!(worst < 3e-6, "off by {worst}");
}

#[test]
fn rotation_agrees_and_is_right() {
    let mut random = Random(22);
    for (dim, head_dim) in [(64, 64), (16, 16), (32, 48)] {
        let spec = RopeSpec { dim, theta: 10_000.0, scaling: RopeScaling::None };
        let table = RopeTable::new(&spec, 2000);
        let mut short = RopeTable::new(&spec, 1234);
        short.prepare([3, 1233, 1234, 4321].into_iter());
        let x = random.numbers(3 * head_dim);
        let mut results = Vec::new();
        for kernels in kernels() {
            let mut heads = x.clone();
            let angles = table.angles(1234, 0);
            let mut job = Rotate { angles, heads: &mut heads, head_dim, scale: 0.5 };
            // SAFETY: the instructions are available.
            unsafe { (kernels.rotate)(&mut job) };
            results.push(bits(&heads));
            // Angles of the step are those of a longer table.
            let mut again = x.clone();
            let angles = short.angles(1234, 2);
            let mut job = Rotate { angles, heads: &mut again, head_dim, scale: 0.5 };
            // SAFETY: the instructions are available.
            unsafe { (kernels.rotate)(&mut job) };
            results.push(bits(&again));
            for i in 0..dim / 2 {
                let angle = 1234.0 / libm::pow(10_000.0, 2.0 * i as f64 / dim as f64);
                let (a, b) = (f64::from(x[i]), f64::from(x[i + dim / 2]));
                let want = (a * libm::cos(angle) - b * libm::sin(angle)) * 0.5;
                assert!((f64::from(heads[i]) - want).abs() < 1e-5);
            }
        }
        assert!(results.iter().all(|r| *r == results[0]));
    }
}
