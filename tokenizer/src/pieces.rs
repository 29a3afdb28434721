//! What each token stands for in bytes.

use baton_types::TokenId;

/// How a vocabulary writes bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// GPT-2's: each byte is one printable character.
    ByteLevel,
    /// SentencePiece's: `▁` for a space, `<0x0A>` for a byte by itself.
    Metaspace {
        /// The encoder puts a space before the text, so that the decoder takes one away.
        strip_leading_space: bool,
    },
}

#[derive(Clone, Debug)]
struct Piece {
    bytes: Box<[u8]>,
    is_control: bool,
}

/// The bytes of every token.
#[derive(Debug)]
pub(crate) struct Pieces {
    spelling: Spelling,
    /// By id; a vocabulary may have holes.
    pieces: Vec<Option<Piece>>,
}

impl Pieces {
    /// `size`: number of ids, holes included.
    pub(crate) fn new(spelling: Spelling, size: usize) -> Self {
        Self { spelling, pieces: vec![None; size] }
    }

    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// A token of the model's own vocabulary, in its spelling.
    pub(crate) fn set_spelt(&mut self, id: TokenId, text: &str) {
        let bytes = match self.spelling {
            Spelling::ByteLevel => byte_level_bytes(text).unwrap_or_else(|| text.into()),
            Spelling::Metaspace { .. } => match fallback_byte(text) {
                Some(byte) => vec![byte],
                None => text.replace('▁', " ").into_bytes(),
            },
        };
        self.set(id, Piece { bytes: bytes.into(), is_control: false });
    }

    /// A token whose text stands for itself.
    pub(crate) fn set_literal(&mut self, id: TokenId, text: &str, is_control: bool) {
        self.set(id, Piece { bytes: text.as_bytes().into(), is_control });
    }

    /// Bytes of one token; a control token's are its name.
    pub(crate) fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.piece(id).map(|piece| &*piece.bytes)
    }

    /// What a token adds to a text: nothing if it is a control token or unknown.
    pub(crate) fn text_bytes(&self, id: TokenId) -> &[u8] {
        self.piece(id).filter(|piece| !piece.is_control).map_or(&[], |piece| &piece.bytes)
    }

    pub(crate) fn strips_leading_space(&self) -> bool {
        self.spelling == Spelling::Metaspace { strip_leading_space: true }
    }

    fn piece(&self, id: TokenId) -> Option<&Piece> {
        self.pieces.get(id as usize)?.as_ref()
    }

    fn set(&mut self, id: TokenId, piece: Piece) {
        self.pieces[id as usize] = Some(piece);
    }
}

/// The byte that `<0x0A>` stands for.
pub(crate) fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// The bytes behind GPT-2's characters; `None` if a character is not one of the 256.
fn byte_level_bytes(text: &str) -> Option<Vec<u8>> {
    text.chars().map(byte_of).collect()
}

/// GPT-2 shows printable Latin-1 bytes as themselves, and the other 68 in order from U+0100.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_one_character() {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut bytes: Vec<u8> = alphabet.iter().map(|c| byte_of(*c).unwrap()).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_level_bytes("Ġé").unwrap(), [b' ', 0xE9]);
        assert_eq!(byte_level_bytes("▁"), None);
    }

    #[test]
    fn metaspace_spelling() {
        let mut pieces = Pieces::new(Spelling::Metaspace { strip_leading_space: true }, 4);
        pieces.set_spelt(0, "▁Hi");
        pieces.set_spelt(1, "<0xE2>");
        pieces.set_literal(2, "<s>", true);
        assert_eq!(pieces.text_bytes(0), b" Hi");
        assert_eq!(pieces.text_bytes(1), [0xE2]);
        assert_eq!((pieces.text_bytes(2), pieces.bytes(2)), (&b""[..], Some(&b"<s>"[..])));
        assert_eq!((pieces.bytes(3), pieces.bytes(9)), (None, None));
        assert_eq!(fallback_byte("<0x123>"), None);
    }
}
