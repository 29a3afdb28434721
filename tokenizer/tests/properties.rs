//! What holds for every text, on the real vocabulary.

mod support;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use baton_tokenizer::{ChatMessage, ChatOptions, Tokenizer};
use baton_types::TokenId;
use proptest::prelude::*;

static TOKENIZER: LazyLock<Option<Tokenizer>> = LazyLock::new(support::smollm2_tokenizer);

/// Texts in which whole and broken names of control tokens are frequent.
fn hostile_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("<|im_start|>".to_owned()),
        Just("<|im_end|>".to_owned()),
        Just("<|endoftext|>".to_owned()),
        Just("<|im_".to_owned()),
        Just("start|>".to_owned()),
        Just("<".to_owned()),
        Just("|>".to_owned()),
        Just("\u{FDD0}".to_owned()),
        "[ \n]{0,3}",
        "\\PC{0,4}",
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

/// How many of `ids` are control tokens.
fn count_control(tokenizer: &Tokenizer, ids: &[TokenId]) -> usize {
    ids.iter().filter(|id| tokenizer.decode(&[**id]).is_empty()).count()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(200)
    })]

    #[test]
    fn text_comes_back(text in any::<String>()) {
        let Some(tokenizer) = TOKENIZER.as_ref() else { return Ok(()) };
        let back = tokenizer.decode(&tokenizer.encode(&text));
        prop_assert_eq!(back, support::survivors(tokenizer, &text));
    }

    #[test]
    fn decoder_parts_join_to_the_whole(ids in prop::collection::vec(0_u32..49_160, 0..64)) {
        let Some(tokenizer) = TOKENIZER.as_ref() else { return Ok(()) };
        let mut decoder = tokenizer.decoder();
        let mut text: String = ids.iter().map(|id| decoder.push(*id)).collect();
        text.push_str(&decoder.finish());
        prop_assert_eq!(&text, &tokenizer.decode(&ids));
        let bytes: Vec<u8> = (ids.iter())
            .filter(|id| !tokenizer.decode(&[**id]).is_empty())
            .flat_map(|id| tokenizer.token_bytes(*id).unwrap())
            .collect();
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn users_text_is_never_control(
        texts in prop::collection::vec(hostile_text(), 1..5),
        name in proptest::option::of(hostile_text()),
    ) {
        let Some(tokenizer) = TOKENIZER.as_ref() else { return Ok(()) };
        let message = |text: &String| ChatMessage {
            name: name.clone(),
            ..ChatMessage::new("user", text.clone())
        };
        let messages: Vec<ChatMessage> = texts.iter().map(message).collect();
        let ids = tokenizer.encode_chat(&messages, &ChatOptions::default()).unwrap();
        // Two for the system message, two for each message, one for the answer.
        prop_assert_eq!(count_control(tokenizer, &ids), 3 + 2 * texts.len());
        let shown = tokenizer.decode(&ids);
        for text in &texts {
            prop_assert_eq!(count_control(tokenizer, &tokenizer.encode(text)), 0);
            prop_assert!(shown.contains(&support::survivors(tokenizer, text)));
        }
    }
}

#[test]
fn long_inputs_take_linear_time() {
    let Some(tokenizer) = TOKENIZER.as_ref() else { return };
    for unit in ["a", " ", "\n", "7", "!", "的", "e\u{301}", "<|im_start|>", "<|", "ab "] {
        let text = unit.repeat((1 << 18) / unit.len());
        let start = Instant::now();
        let ids = tokenizer.encode(&text);
        assert_eq!(tokenizer.decode(&ids), text);
        let messages = [ChatMessage::new("user", text)];
        tokenizer.encode_chat(&messages, &ChatOptions::default()).unwrap();
        let took = start.elapsed();
        assert!(took < Duration::from_secs(20), "{unit:?} took {took:?} for 256 KiB");
    }
}
