//! `ModelArtifacts` as JSON, a zero byte, text: an error or a tokenizer that takes the text, never
//! a panic.
#![no_main]

use baton_tokenizer::Tokenizer;
use baton_types::ModelArtifacts;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let zero = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (artifacts, text) = bytes.split_at(zero);
    let Ok(artifacts) = serde_json::from_slice::<ModelArtifacts>(artifacts) else { return };
    let Ok(tokenizer) = Tokenizer::from_artifacts(&artifacts) else { return };
    let text = String::from_utf8_lossy(text.get(1..).unwrap_or_default());
    let ids = tokenizer.encode_prompt(&text);
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
    tokenizer.decode(&ids);
});
