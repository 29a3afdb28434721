//! The real model, where `models/` holds it.

use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_engine::eval::perplexity;
use baton_model_files::ModelFile;

#[test]
fn perplexity_from_env() {
    let Ok(path) = std::env::var("BATON_MODEL") else { return };
    let ids: Vec<u32> = std::fs::read_to_string(std::env::var("BATON_IDS").unwrap())
        .unwrap()
        .split_whitespace()
        .map(|id| id.parse().unwrap())
        .collect();
    let model = ModelFile::open(path).unwrap();
    let start = std::time::Instant::now();
    let config = CpuConfig { threads: 2, max_logit_rows: 256, ..CpuConfig::default() };
    let mut backend = CpuBackend::new(&model, config).unwrap();
    eprintln!("loaded in {:?}: {backend:?}", start.elapsed());
    let start = std::time::Instant::now();
    let result = perplexity(&mut backend, &ids, 512, None).unwrap();
    eprintln!("{result:?} in {:?}", start.elapsed());
}
