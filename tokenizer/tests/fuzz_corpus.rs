//! Replays what the fuzzers (`fuzz/`) have collected, on the stable toolchain.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use baton_tokenizer::{ChatMessage, ChatOptions, Tokenizer};
use baton_types::{GgufVocab, ModelArtifacts, TokenizerSource};

/// A template may run for less than this, even in a debug build on a busy machine.
const RENDER_WITHIN: Duration = Duration::from_secs(20);

/// What stands before the first zero byte, and the text after it.
fn inputs(target: &str) -> Vec<(Vec<u8>, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let entries = fs::read_dir(folder).unwrap();
    let inputs = entries.map(|entry| {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        let zero = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let text = bytes.get(zero + 1..).unwrap_or_default();
        (bytes[..zero].to_vec(), String::from_utf8_lossy(text).into_owned())
    });
    inputs.collect()
}

#[test]
fn tokenizers() {
    let mut usable = 0;
    for (artifacts, text) in inputs("tokenizer") {
        let Ok(artifacts) = serde_json::from_slice::<ModelArtifacts>(&artifacts) else { continue };
        let Ok(tokenizer) = Tokenizer::from_artifacts(&artifacts) else { continue };
        let ids = tokenizer.encode_prompt(&text);
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        tokenizer.decode(&ids);
        usable += 1;
    }
    assert!(usable >= 3, "the seeds themselves are good");
}

#[test]
fn chat_templates() {
    let vocab = GgufVocab {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: ["a", "b", "ab"].map(String::from).to_vec(),
        scores: Vec::new(),
        token_types: Vec::new(),
        merges: vec!["a b".into()],
        unknown_id: None,
        add_space_prefix: None,
    };
    let mut rendered = 0;
    for (template, text) in inputs("chat_template") {
        let artifacts = ModelArtifacts {
            tokenizer: TokenizerSource::Gguf(vocab.clone()),
            chat_template: Some(String::from_utf8_lossy(&template).into_owned()),
            bos_id: None,
            eos_ids: vec![0],
            add_bos: false,
        };
        let Ok(tokenizer) = Tokenizer::from_artifacts(&artifacts) else { continue };
        let message = ChatMessage { role: "user".into(), content: text, name: None };
        let began = Instant::now();
        let prompt = tokenizer.encode_chat(&[message], &ChatOptions::default());
        assert!(began.elapsed() < RENDER_WITHIN, "a template ran for {:?}", began.elapsed());
        rendered += usize::from(prompt.is_ok());
    }
    assert!(rendered >= 2, "the seeds themselves are good");
}
