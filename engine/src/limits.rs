//! What this machine can do at most, measured: how fast it reads memory, and how fast it
//! multiplies. Benchmarks hold the engine against both.

use std::io;
use std::time::Instant;

use serde::Serialize;

use crate::Isa;
use crate::cpu::CpuConfig;
use crate::kernels::burn::{DOT_ROUND_OPS, FLOAT_ROUND_OPS};
use crate::kernels::dispatch::Kernels;
use crate::memory::Buffer;
use crate::pool::{Pool, share};

/// Measurements of each; the best counts, since a ceiling is what the machine can do undisturbed.
const REPEATS: usize = 25;

/// Takes some milliseconds.
const BURN_ROUNDS: usize = 1_000_000;

/// Ceilings of one machine, for a number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MachineLimits {
    /// Bytes that a plain streaming read of a buffer yields in a second.
    pub read_bytes_per_s: f64,
    /// Operations of dots of bytes in a second; measured with AVX-512 only.
    pub dot_ops_per_s: Option<f64>,
    /// Operations of fused multiply-adds of `f32` in a second.
    pub float_ops_per_s: f64,
}

/// Measures with `threads` threads; the reads are of a buffer of `bytes` bytes.
///
/// # Errors
/// When there is no memory, or the threads cannot start.
pub fn measure_limits(threads: usize, bytes: usize) -> io::Result<MachineLimits> {
    let mut pool = Pool::new(threads, CpuConfig::default().spin)?;
    let mut buffer: Buffer<u8> = Buffer::zeroed(bytes)?;
    // A page that was never written is not in memory.
    buffer.fill(1);
    let buffer = buffer.parts();
    let isa = Isa::detect();
    let kernels = Kernels::new(isa);
    let read = best(|| {
        pool.run(&|thread| {
            // SAFETY: nobody writes, and `Kernels::new` has looked at the processor.
            unsafe {
                let all = buffer.of(0..buffer.len());
                std::hint::black_box((kernels.read)(&all[share(all.len(), threads, thread)]));
            }
        });
    });
    let dots = (isa == Isa::Avx512).then(|| {
        best(|| {
            pool.run(&|_thread| {
                // SAFETY: `Kernels::new` has looked at the processor.
                std::hint::black_box(unsafe { (kernels.burn_dots)(BURN_ROUNDS) });
            });
        })
    });
    let floats = best(|| {
        pool.run(&|_thread| {
            // SAFETY: `Kernels::new` has looked at the processor.
            std::hint::black_box(unsafe { (kernels.burn_floats)(BURN_ROUNDS) });
        });
    });
    let rate =
        |round_ops: usize, seconds: f64| (threads * BURN_ROUNDS * round_ops) as f64 / seconds;
    Ok(MachineLimits {
        read_bytes_per_s: bytes as f64 / read,
        dot_ops_per_s: dots.map(|seconds| rate(DOT_ROUND_OPS, seconds)),
        float_ops_per_s: rate(FLOAT_ROUND_OPS, floats),
    })
}

/// Seconds.
fn best(mut work: impl FnMut()) -> f64 {
    let measure = |_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    (0..REPEATS).map(measure).fold(f64::INFINITY, f64::min)
}
