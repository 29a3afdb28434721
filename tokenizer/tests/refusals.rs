//! Vocabularies that cannot be used are refused with the reason; odd ones stay safe.

use baton_tokenizer::Tokenizer;
use baton_types::{Error, ErrorCode, GgufVocab, ModelArtifacts, TokenizerSource};
use serde_json::{Value, json};

fn artifacts(tokenizer: TokenizerSource) -> ModelArtifacts {
    ModelArtifacts {
        tokenizer,
        chat_template: None,
        bos_id: None,
        eos_ids: vec![0],
        add_bos: false,
    }
}

fn gguf(tokens: &[&str], merges: &[&str]) -> GgufVocab {
    let owned = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect();
    GgufVocab {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: owned(tokens),
        scores: Vec::new(),
        token_types: Vec::new(),
        merges: owned(merges),
        unknown_id: None,
        add_space_prefix: None,
    }
}

fn json_source(changes: Value) -> TokenizerSource {
    let Value::Object(mut definition) = json!({
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }) else {
        panic!("an object")
    };
    let Value::Object(changes) = changes else { panic!("an object") };
    definition.extend(changes);
    TokenizerSource::Json(Value::Object(definition).to_string())
}

#[test]
fn reasons_are_told() {
    let base = || gguf(&["a", "b"], &[]);
    for (source, reason) in [
        (TokenizerSource::Gguf(GgufVocab { model: "bert".into(), ..base() }), "`bert`"),
        (TokenizerSource::Gguf(GgufVocab { pre: Some("new".into()), ..base() }), "`new`"),
        (TokenizerSource::Gguf(gguf(&["a", "b"], &["ab"])), "no space"),
        (TokenizerSource::Gguf(gguf(&["e", "a", "b"], &["a b"])), "out of vocabulary"),
        (TokenizerSource::Gguf(GgufVocab { model: "llama".into(), ..base() }), "scores"),
        (TokenizerSource::Json("{".into()), "EOF"),
        (TokenizerSource::Json("{}".into()), "model.vocab"),
        (json_source(json!({"model": {"type": "Unigram", "vocab": []}})), "Unigram"),
        (json_source(json!({"decoder": {"type": "WordPiece"}})), "WordPiece"),
        (json_source(json!({"decoder": null})), "none"),
        (json_source(json!({"model": {"vocab": {"a": -1}, "merges": []}})), "no id"),
        (json_source(json!({"model": {"vocab": {"a": 99_999_999}, "merges": []}})), "99999999"),
        (json_source(json!({"model": {"type": "BPE", "vocab": {}, "merges": []}})), "empty"),
        (json_source(json!({"added_tokens": [{"id": 0, "content": "<x>"}]})), "`<x>` has the id 0"),
        (
            json_source(json!({"added_tokens": [{"id": 7, "content": "<x>"},
                {"id": 7, "content": "<y>"}]})),
            "`<y>` has the id 7 of `<x>`",
        ),
        (
            json_source(json!({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [],
                "unk_token": "?"}})),
            "`?`",
        ),
    ] {
        let error = Error::from(Tokenizer::from_artifacts(&artifacts(source)).unwrap_err());
        assert_eq!(error.code, ErrorCode::Unsupported, "{error}");
        assert!(error.message.contains(reason), "{error} does not say {reason}");
    }
}

/// What a `tokenizer.json` keeps of its training does not touch prompts.
#[test]
fn nothing_cuts_fills_or_shuffles_a_prompt() {
    let model = |dropout: Value| {
        json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "bb": 2, "bbbb": 3}, "dropout": dropout,
            "merges": ["b b", "bb bb"]})
    };
    let truncation = |most: u32| {
        json!({"truncation": {"direction": "Right", "max_length": most, "strategy": "LongestFirst",
            "stride": 0}})
    };
    let padding = json!({"padding": {"strategy": {"Fixed": 16}, "direction": "Left",
        "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}});
    for changes in [
        json!({}),
        truncation(1),
        padding,
        json!({"model": model(json!(0.9))}),
        json!({"model": model(json!(0))}),
    ] {
        let mut definition = json!({"model": model(json!(null))});
        definition.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let tokenizer = Tokenizer::from_artifacts(&artifacts(json_source(definition))).unwrap();
        let prompt = "b".repeat(24);
        assert_eq!(tokenizer.encode_prompt(&prompt), [3; 6], "{changes}");
        assert_eq!(tokenizer.encode_with_control(&prompt), [3; 6], "{changes}");
    }
}

#[test]
fn a_word_that_is_a_control_token_stays_a_word() {
    // With `ignore_merges`, a word that is in the vocabulary is taken whole.
    let vocab = GgufVocab {
        pre: Some("llama3".into()),
        ..gguf(&["END", "E", "N", "D", "EN"], &["E N", "EN D"])
    };
    let tokenizer = Tokenizer::from_artifacts(&artifacts(TokenizerSource::Gguf(vocab))).unwrap();
    assert_eq!(tokenizer.encode("END"), [4, 3]);
    assert_eq!(tokenizer.encode_with_control("END"), [0]);
    assert_eq!(tokenizer.token_text(0), "END");
    assert_eq!(tokenizer.decode(&[0, 1]), "E");
}

#[test]
fn added_tokens_of_json_are_control_only_if_special() {
    let added = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "special": special, "normalized": false,
            "lstrip": false, "rstrip": special, "single_word": false})
    };
    let source = json_source(json!({
        "added_tokens": [added(3, "<|x|>", true), added(4, "<y>", false)],
        "model": {"type": "BPE", "vocab": {"<": 1, "b": 2, "|": 5, "x": 6, ">": 7}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
    }));
    let tokenizer = Tokenizer::from_artifacts(&artifacts(source)).unwrap();
    assert_eq!(tokenizer.encode("<|x|><y>b"), [1, 5, 6, 5, 7, 4, 2]);
    assert_eq!(tokenizer.encode_with_control("<|x|>  b<y>"), [3, 2, 4]);
    assert_eq!(tokenizer.decode(&[3, 4, 2]), "<y>b");
    assert_eq!(tokenizer.vocab_size(), 8);
    assert_eq!(tokenizer.token_bytes(0), None);
}
