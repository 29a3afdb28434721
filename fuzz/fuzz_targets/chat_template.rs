//! A template, a zero byte, what a user says: an error or a prompt, in bounded time and size.
#![no_main]

use baton_tokenizer::{ChatMessage, ChatOptions, Tokenizer};
use baton_types::{GgufVocab, ModelArtifacts, TokenizerSource};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let zero = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (template, text) = bytes.split_at(zero);
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
    let artifacts = ModelArtifacts {
        tokenizer: TokenizerSource::Gguf(vocab),
        chat_template: Some(String::from_utf8_lossy(template).into_owned()),
        bos_id: None,
        eos_ids: vec![0],
        add_bos: false,
    };
    let Ok(tokenizer) = Tokenizer::from_artifacts(&artifacts) else { return };
    let content = String::from_utf8_lossy(text.get(1..).unwrap_or_default()).into_owned();
    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: content.into(),
        name: None,
    };
    let messages = [message("system", "be brief"), message("user", &content)];
    let _prompt = tokenizer.encode_chat(&messages, &ChatOptions::default());
});
