use proptest::prelude::*;

use super::*;
use crate::pieces::Spelling;

/// Token `n` is byte `n`, 256 is `▁`, 257 is `é`, 258 is a control token.
fn bytes_vocabulary(strip_leading_space: bool) -> Arc<Pieces> {
    let mut pieces = Pieces::new(Spelling::Metaspace { strip_leading_space }, 260);
    for byte in 0..256 {
        pieces.set_spelt(byte, &format!("<0x{byte:02X}>"));
    }
    pieces.set_spelt(256, "▁");
    pieces.set_spelt(257, "é");
    pieces.set_literal(258, "<s>", true);
    Arc::new(pieces)
}

fn push_all(decoder: &mut TextDecoder, ids: &[TokenId]) -> Vec<String> {
    ids.iter().map(|id| decoder.push(*id)).collect()
}

#[test]
fn waits_for_the_whole_character() {
    let mut decoder = TextDecoder::new(bytes_vocabulary(false));
    let texts = push_all(&mut decoder, &[0x61, 0xF0, 0x9F, 258, 0x98, 0x80, 0xE2, 0x82]);
    assert_eq!(texts, ["a", "", "", "", "", "😀", "", ""]);
    assert_eq!((decoder.finish(), decoder.finish()), ("\u{FFFD}".into(), String::new()));
}

#[test]
fn broken_bytes_become_replacements_at_once() {
    let mut decoder = TextDecoder::new(bytes_vocabulary(false));
    let texts = push_all(&mut decoder, &[0xFF, 0xE2, 0x61, 0xC3, 257]);
    assert_eq!(texts, ["\u{FFFD}", "", "\u{FFFD}a", "", "\u{FFFD}é"]);
}

#[test]
fn the_encoders_space_is_taken_away_once() {
    let mut decoder = TextDecoder::new(bytes_vocabulary(true));
    assert_eq!(push_all(&mut decoder, &[258, 256, 256, 999, 0x61]), ["", "", " ", "", "a"]);
    let mut decoder = TextDecoder::new(bytes_vocabulary(true)).keeping_leading_space();
    assert_eq!(push_all(&mut decoder, &[256, 0x61]), [" ", "a"]);
}

proptest! {
    #[test]
    fn joined_parts_are_the_lossy_whole(
        ids in prop::collection::vec(
            prop_oneof![0_u32..260, 0x80_u32..0xC0, 0xE0_u32..0xF5],
            0..40,
        ),
        strip in any::<bool>(),
    ) {
        let pieces = bytes_vocabulary(strip);
        let bytes: Vec<u8> =
            ids.iter().flat_map(|id| pieces.text_bytes(*id).to_vec()).collect();
        let stripped = bytes.strip_prefix(b" ").filter(|_| strip).unwrap_or(&bytes);
        let mut decoder = TextDecoder::new(pieces);
        let mut text = String::new();
        for id in ids {
            text.push_str(&decoder.push(id));
            prop_assert!(decoder.pending.len() < 4);
        }
        text.push_str(&decoder.finish());
        prop_assert_eq!(text, String::from_utf8_lossy(stripped));
    }
}
