//! The same ids as Hugging Face's libraries and llama.cpp; `tests/golden/tokenizer/make.py` made
//! the files.

mod support;

use baton_tokenizer::{ChatMessage, ChatOptions, Tokenizer};
use baton_types::{GgufVocab, ModelArtifacts, TokenId, TokenizerSource};
use serde::Deserialize;
use serde_json::json;

#[derive(Deserialize)]
struct Case {
    name: String,
    text: String,
    ids: Vec<TokenId>,
}

#[derive(Deserialize)]
struct Texts {
    texts: Vec<Case>,
    with_control: Vec<Case>,
}

#[derive(Deserialize)]
struct Chat {
    name: String,
    messages: Vec<Message>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    text: String,
    ids: Vec<TokenId>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
}

#[derive(Deserialize)]
struct SmolLm2 {
    #[serde(flatten)]
    texts: Texts,
    chats: Vec<Chat>,
}

#[derive(Deserialize)]
struct TinySpm {
    vocab: TinyVocab,
    legacy: Texts,
    first: Texts,
}

#[derive(Deserialize)]
struct TinyVocab {
    tokens: Vec<String>,
    token_types: Vec<i32>,
    scores: Vec<f32>,
}

fn check_texts(tokenizer: &Tokenizer, golden: &Texts) {
    for Case { name, text, ids } in &golden.texts {
        assert_eq!(&tokenizer.encode(text), ids, "{name}");
    }
    for Case { name, text, ids } in &golden.with_control {
        assert_eq!(&tokenizer.encode_with_control(text), ids, "{name}, with control tokens");
    }
}

#[test]
fn smollm2_as_the_references() {
    let Some(tokenizer) = support::smollm2_tokenizer() else { return };
    let golden: SmolLm2 = support::golden("smollm2.json");
    check_texts(&tokenizer, &golden.texts);
    for Case { name, text, ids } in &golden.texts.texts {
        assert_eq!(tokenizer.decode(ids), support::survivors(&tokenizer, text), "{name}");
    }
    for chat in golden.chats {
        let messages: Vec<ChatMessage> =
            chat.messages.into_iter().map(|m| ChatMessage::new(m.role, m.content)).collect();
        let options = ChatOptions {
            add_generation_prompt: chat.add_generation_prompt,
            continue_final_message: chat.continue_final_message,
            ..ChatOptions::default()
        };
        let ids = tokenizer.encode_chat(&messages, &options).unwrap();
        let bytes: Vec<u8> =
            ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap()).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), chat.text, "{}", chat.name);
        assert_eq!(ids, chat.ids, "{}", chat.name);
    }
}

/// A `tokenizer.json` with the real vocabulary, as Hugging Face's hub has it.
fn smollm2_json(vocab: &GgufVocab) -> String {
    let added: Vec<_> = (vocab.tokens.iter().zip(&vocab.token_types).enumerate())
        .filter(|(_, (_, kind))| **kind == 3)
        .map(|(id, (text, _))| {
            json!({
                "id": id, "content": text, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        })
        .collect();
    let ids: serde_json::Map<_, _> =
        vocab.tokens.iter().enumerate().map(|(id, text)| (text.clone(), json!(id))).collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": true}, byte_level],
        },
        "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": vocab.merges},
    })
    .to_string()
}

#[test]
fn tokenizer_json_as_gguf() {
    let Some(artifacts) = support::smollm2() else { return };
    let TokenizerSource::Gguf(vocab) = &artifacts.tokenizer else { panic!("a GGUF model") };
    let source = TokenizerSource::Json(smollm2_json(vocab));
    let tokenizer =
        Tokenizer::from_artifacts(&ModelArtifacts { tokenizer: source, ..artifacts.clone() })
            .unwrap();
    assert_eq!(tokenizer.vocab_size(), vocab.tokens.len());
    let golden: SmolLm2 = support::golden("smollm2.json");
    check_texts(&tokenizer, &golden.texts);
}

fn tiny_artifacts(tokenizer: TokenizerSource) -> ModelArtifacts {
    ModelArtifacts {
        tokenizer,
        chat_template: None,
        bos_id: Some(1),
        eos_ids: vec![2],
        add_bos: true,
    }
}

#[test]
fn scores_as_the_references() {
    let golden: TinySpm = support::golden("tiny-spm.json");
    let vocab = GgufVocab {
        model: "llama".into(),
        pre: None,
        tokens: golden.vocab.tokens,
        scores: golden.vocab.scores,
        token_types: golden.vocab.token_types,
        merges: Vec::new(),
        unknown_id: Some(0),
        add_space_prefix: None,
    };
    let artifacts = tiny_artifacts(TokenizerSource::Gguf(vocab));
    let tokenizer = Tokenizer::from_artifacts(&artifacts).unwrap();
    check_texts(&tokenizer, &golden.legacy);
    for Case { name, text, ids } in &golden.legacy.texts {
        // `▁` in a text cannot be told from a space.
        assert_eq!(tokenizer.decode(ids), text.replace('▁', " "), "{name}");
    }
    assert_eq!(tokenizer.encode_prompt("hello")[0], 1);
}

#[test]
fn sentence_piece_json_as_the_references() {
    let golden: TinySpm = support::golden("tiny-spm.json");
    for (file, texts) in [
        ("tiny-spm-legacy.tokenizer.json", &golden.legacy),
        ("tiny-spm-first.tokenizer.json", &golden.first),
    ] {
        let source = TokenizerSource::Json(support::golden_text(file));
        let tokenizer = Tokenizer::from_artifacts(&tiny_artifacts(source)).unwrap();
        check_texts(&tokenizer, texts);
    }
}
