//! Token ids to text, one id at a time.

use std::sync::Arc;

use baton_types::TokenId;

use crate::pieces::Pieces;

/// Turns the ids of one answer into text as they come.
///
/// Everything that [`push`](Self::push) and [`finish`](Self::finish) return, joined, is what
/// [`Tokenizer::decode`](crate::Tokenizer::decode) gives for the same ids. Each part is whole
/// UTF-8: the start of a character waits for its end, and bytes that can no longer become a
/// character turn into U+FFFD as the Unicode Standard recommends (one for each maximal subpart).
#[derive(Clone, Debug)]
pub struct TextDecoder {
    pieces: Arc<Pieces>,
    /// The start of a character; at most 3 bytes between calls.
    pending: Vec<u8>,
    /// Whether the next byte, if it is a space, was put there by the encoder.
    drop_space: bool,
}

impl TextDecoder {
    pub(crate) fn new(pieces: Arc<Pieces>) -> Self {
        let drop_space = pieces.strips_leading_space();
        Self { pieces, pending: Vec::new(), drop_space }
    }

    /// Keeps a leading space: for text that goes on where a raw prompt ended.
    #[must_use]
    pub fn keeping_leading_space(mut self) -> Self {
        self.drop_space = false;
        self
    }

    /// The text that `id` has made certain. Control tokens and ids outside the vocabulary give
    /// none.
    pub fn push(&mut self, id: TokenId) -> String {
        let mut bytes = self.pieces.text_bytes(id);
        if self.drop_space && !bytes.is_empty() {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            self.drop_space = false;
        }
        self.pending.extend_from_slice(bytes);
        self.take_certain()
    }

    /// What is left at the end: U+FFFD if a character was never completed.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_certain(&mut self) -> String {
        let mut text = String::with_capacity(self.pending.len());
        let mut certain = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            certain += chunk.valid().len();
            let invalid = chunk.invalid();
            let is_last = certain + invalid.len() == self.pending.len();
            if is_last && (invalid.is_empty() || is_start_of_char(invalid)) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            certain += invalid.len();
        }
        self.pending.drain(..certain);
        text
    }
}

/// Whether more bytes could make `bytes` a character.
fn is_start_of_char(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none())
}

#[cfg(test)]
mod tests;
