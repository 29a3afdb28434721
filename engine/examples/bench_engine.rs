//! `cargo run --release -p baton-engine --example bench_engine -- MODEL [THREADS] [ISA]`

use std::error::Error;

use baton_engine::Isa;
use baton_engine::bench::{BenchPlan, measure};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_model_files::ModelFile;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = ModelFile::open(arguments.next().ok_or("the path of a model is missing")?)?;
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let isa = match arguments.next().as_deref() {
        Some("scalar") => Some(Isa::Scalar),
        Some("avx2") => Some(Isa::Avx2),
        _ => None,
    };
    let plan = BenchPlan {
        prefill_tokens: vec![512],
        batches: vec![1, 8, 32],
        context_tokens: 128,
        repeats: 5,
    };
    let config = CpuConfig { threads, isa, ..CpuConfig::default() };
    let mut backend = CpuBackend::new(&model, config)?;
    let report = measure(&mut backend, &plan, threads)?;
    for speed in report.prefill {
        println!("prefill {}: {:.0} t/s", speed.tokens, speed.tokens_per_s);
    }
    for speed in report.decode {
        println!("decode batch {}: {:.0} t/s", speed.batch, speed.tokens_per_s);
    }
    Ok(())
}
