//! What this machine can do at most, measured: how fast it reads memory, and how fast it
//! multiplies. Benchmarks hold the engine against both.

use std::io;
use std::time::Instant;

use crate::Isa;
use crate::cpu::CpuConfig;
use crate::kernels::burn::ROUND_OPS;
use crate::kernels::dispatch::Kernels;
use crate::memory::Buffer;
use crate::pool::{Pool, share};

/// Measurements of each; the median counts.
const REPEATS: usize = 7;

/// Takes some milliseconds.
const BURN_ROUNDS: usize = 1_000_000;

/// Ceilings of one machine, for a number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLimits {
    /// Bytes that a plain streaming read of a buffer yields in a second.
    pub read_bytes_per_s: f64,
    /// Operations of dots of bytes in a second; measured with AVX-512 only.
    pub dot_ops_per_s: Option<f64>,
}

/// Measures with `threads` threads; the reads are of a buffer of `bytes` bytes.
///
/// # Errors
/// When there is no memory, or the threads cannot start.
pub fn measure_limits(threads: usize, bytes: usize) -> io::Result<MachineLimits> {
    let mut pool = Pool::new(threads, CpuConfig::default().spin)?;
    let mut buffer: Buffer<u64> = Buffer::zeroed(bytes / size_of::<u64>())?;
    // A page that was never written is not in memory.
    buffer.fill(1);
    let numbers = buffer.parts();
    let read = median(|| {
        pool.run(&|thread| {
            // SAFETY: nobody writes.
            let all = unsafe { numbers.of(0..numbers.len()) };
            std::hint::black_box(sum(&all[share(all.len(), threads, thread)]));
        });
    });
    let isa = Isa::detect();
    let dots = (isa == Isa::Avx512).then(|| {
        let kernels = Kernels::new(isa);
        median(|| {
            pool.run(&|_thread| {
                // SAFETY: `Kernels::new` has looked at the processor.
                std::hint::black_box(unsafe { (kernels.burn)(BURN_ROUNDS) });
            });
        })
    });
    Ok(MachineLimits {
        read_bytes_per_s: bytes as f64 / read,
        dot_ops_per_s: dots.map(|seconds| (threads * BURN_ROUNDS * ROUND_OPS) as f64 / seconds),
    })
}

/// In eight chains, so that it waits for memory alone.
fn sum(numbers: &[u64]) -> u64 {
    let mut sums = [0u64; 8];
    for eight in numbers.as_chunks().0 {
        for (sum, number) in sums.iter_mut().zip(eight as &[u64; 8]) {
            *sum = sum.wrapping_add(*number);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

/// Seconds.
fn median(mut work: impl FnMut()) -> f64 {
    let mut seconds = [0.0; REPEATS];
    for taken in &mut seconds {
        let start = Instant::now();
        work();
        *taken = start.elapsed().as_secs_f64();
    }
    seconds.sort_by(f64::total_cmp);
    seconds[REPEATS / 2]
}
