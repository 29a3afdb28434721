//! The real model, where `models/` holds it.

use baton_model_files::{LayerTensor, ModelFile, TensorDtype, TensorRole};

const MODEL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../models/SmolLM2-135M-Instruct.Q4_1.gguf");

#[test]
fn smollm2_opens_with_its_shapes() {
    // It is too large for Miri.
    if cfg!(miri) || !std::path::Path::new(MODEL).exists() {
        eprintln!("skipped: no {MODEL}");
        return;
    }
    let model = ModelFile::open(MODEL).unwrap();
    let spec = model.spec();
    assert_eq!(spec.name, "SmolLM2-135M-Instruct");
    assert_eq!((spec.layers, spec.hidden, spec.ffn, spec.vocab), (30, 576, 1536, 49152));
    assert_eq!((spec.heads, spec.kv_heads, spec.head_dim), (9, 3, 64));
    assert_eq!(spec.eos_ids, [2]);
    assert!(spec.tied_embeddings && !model.artifacts().add_bos);
    let down = model.tensor(TensorRole::Layer(29, LayerTensor::Down));
    assert_eq!((down.dtype, down.rows, down.cols), (TensorDtype::Q4_1, 576, 1536));
    let start = std::time::Instant::now();
    let fingerprint = model.fingerprint();
    eprintln!("fingerprint {fingerprint} in {:?}", start.elapsed());
    assert_eq!(fingerprint, ModelFile::open(MODEL).unwrap().fingerprint());
}
