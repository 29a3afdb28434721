//! The models and golden files that the tests share.

#![allow(dead_code, reason = "each test binary uses what it needs")]
#![allow(clippy::unwrap_used, reason = "only tests call this")]

use std::path::Path;

use baton_model_files::ModelFile;
use baton_tokenizer::Tokenizer;
use baton_types::{ModelArtifacts, TokenId};
use serde::de::DeserializeOwned;

const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Tokenizer data of the real model, from `$BATON_TEST_MODELS` or `models/`; `None`, with a
/// word, where it is not there.
pub fn smollm2() -> Option<ModelArtifacts> {
    let folder = std::env::var("BATON_TEST_MODELS")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../models").to_owned());
    let path = Path::new(&folder).join(MODEL);
    if !path.exists() {
        eprintln!("skipped: no {}; `make up` fetches it", path.display());
        return None;
    }
    Some(ModelFile::open(path).unwrap().artifacts().clone())
}

pub fn smollm2_tokenizer() -> Option<Tokenizer> {
    smollm2().map(|artifacts| Tokenizer::from_artifacts(&artifacts).unwrap())
}

pub fn golden_text(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokenizer");
    std::fs::read_to_string(Path::new(folder).join(name)).unwrap()
}

pub fn golden<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_str(&golden_text(name)).unwrap()
}

/// What comes back of a text that is encoded and decoded: all of it, but for bytes that the
/// vocabulary has no token for (SmolLM2's lacks some control characters, and F1 to F4).
pub fn survivors(tokenizer: &Tokenizer, text: &str) -> String {
    let mut has_token = [false; 256];
    for id in 0..TokenId::try_from(tokenizer.vocab_size()).unwrap() {
        if let Some([byte]) = tokenizer.token_bytes(id).as_deref() {
            has_token[usize::from(*byte)] = true;
        }
    }
    let bytes: Vec<u8> = text.bytes().filter(|byte| has_token[usize::from(*byte)]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
