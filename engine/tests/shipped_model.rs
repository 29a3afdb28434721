//! The real model, where `models/` holds it.

#![allow(clippy::unwrap_used)]

use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_engine::eval::perplexity;
use baton_model_files::ModelFile;
use baton_types::StreamingAttention;

const MODEL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../models/SmolLM2-135M-Instruct.Q4_1.gguf");

/// The first 2,048 tokens of the GPL 3, by llama.cpp's `llama-tokenize`.
const IDS: &str = include_str!("golden/gpl3.ids");

/// `llama-perplexity -c 512 --chunks 4` on the same file and text.
const LLAMA_CPP: f64 = 18.3363;

#[test]
fn perplexity_is_that_of_llama_cpp() {
    let path = std::env::var("BATON_MODEL").unwrap_or_else(|_| MODEL.to_owned());
    if !std::path::Path::new(&path).exists() {
        eprintln!("skipped: no {path}");
        return;
    }
    let ids: Vec<u32> = match std::env::var("BATON_IDS") {
        Ok(path) => parse(&std::fs::read_to_string(path).unwrap()),
        Err(_) => parse(IDS),
    };
    let model = ModelFile::open(path).unwrap();
    let config = CpuConfig { threads: 2, max_logit_rows: 256, ..CpuConfig::default() };
    let mut backend = CpuBackend::new(&model, config).unwrap();
    let result = perplexity(&mut backend, &ids, 512, None, None).unwrap();
    eprintln!("{backend:?}: {result:?}");
    if std::env::var_os("BATON_MODEL").is_none() {
        let off = result.perplexity / LLAMA_CPP - 1.0;
        assert!(off.abs() < 0.01, "{} is {off:+} from {LLAMA_CPP}", result.perplexity);
    }
}

fn parse(ids: &str) -> Vec<u32> {
    ids.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

/// Past its window the model goes on as before as long as it keeps its first tokens; without them
/// it loses its language (Xiao et al., 2023, figure 3).
#[test]
fn sinks_keep_the_model_fluent() {
    if !std::path::Path::new(MODEL).exists() {
        eprintln!("skipped: no {MODEL}");
        return;
    }
    let model = ModelFile::open(MODEL).unwrap();
    let config = CpuConfig { threads: 2, max_logit_rows: 256, ..CpuConfig::default() };
    let mut backend = CpuBackend::new(&model, config).unwrap();
    let ids = parse(IDS);
    let mut of = |sinks, window| {
        let streaming = Some(StreamingAttention { sinks, window });
        perplexity(&mut backend, &ids, 2_048, None, streaming).unwrap().perplexity
    };
    let (whole, with_sinks, without) = (of(4, 2_044), of(4, 252), of(0, 256));
    eprintln!("all {whole}, four sinks and 252 {with_sinks}, 256 alone {without}");
    assert!(with_sinks < 1.5 * whole && without > 1.5 * with_sinks);
}
