//! Logits of a tiny Llama against a reference of its own in f64 (`golden/llama.py`).

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

use baton_engine::backend::{Backend, LogitRows, NoSink, Span};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_model_files::ModelFile;
use baton_types::{BlockId, StreamingAttention, TokenId};
use serde::Deserialize;

/// f32 against f64 through two layers, with logits of about 1.
const TOLERANCE: f64 = 2e-4;

#[derive(Deserialize)]
struct Golden {
    tokens: Vec<TokenId>,
    /// Of some positions.
    logits: BTreeMap<usize, Vec<f64>>,
    streaming: Streaming,
}

/// The same with sinks and a window: keys rotated anew at each token, to their places in the cache.
#[derive(Deserialize)]
struct Streaming {
    sinks: u32,
    window: u32,
    logits: BTreeMap<usize, Vec<f64>>,
}

#[test]
fn llama() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama");
    let golden = std::fs::read_to_string(folder.join("golden.json")).unwrap();
    let golden: Golden = serde_json::from_str(&golden).unwrap();
    let model = ModelFile::open(&folder).unwrap();
    let config = CpuConfig { threads: 2, max_logit_rows: 512, ..CpuConfig::default() };
    let mut backend = CpuBackend::new(&model, config).unwrap();
    let blocks: Vec<BlockId> = (0..32).map(BlockId).collect();
    let vocab = model.spec().vocab;
    let (tokens, logits) = (&golden.tokens, LogitRows::All);
    let Streaming { sinks, window, logits: with_window } = golden.streaming;
    let streaming = Some(StreamingAttention { sinks, window });
    for (streaming, rows) in [(None, &golden.logits), (streaming, &with_window)] {
        let span = Span { tokens, first_position: 0, blocks: &blocks, logits, streaming };
        let got = backend.step(&[span], &mut NoSink).unwrap();
        let mut worst = 0.0f64;
        for (row, want) in rows {
            assert_eq!(want.len(), vocab);
            for (got, want) in got[row * vocab..].iter().zip(want) {
                worst = worst.max((f64::from(*got) - want).abs());
            }
        }
        eprintln!("{streaming:?}: largest difference {worst}");
        assert!(worst < TOLERANCE, "{streaming:?}: logits differ by up to {worst}");
    }
    let differs = |row: &usize| golden.logits[row] != with_window[row];
    assert!([100, 255, 256].iter().all(differs));
}
