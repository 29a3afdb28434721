//! Control tokens: found in text, by the rules of Hugging Face's added tokens.

use baton_types::TokenId;

/// One token that only the server may put into a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ControlToken {
    pub(crate) id: TokenId,
    pub(crate) text: String,
    /// Takes the white space before it along.
    pub(crate) lstrip: bool,
    /// Takes the white space after it along.
    pub(crate) rstrip: bool,
    /// Only between characters that are not part of a word.
    pub(crate) single_word: bool,
}

impl ControlToken {
    pub(crate) fn plain(id: TokenId, text: String) -> Self {
        Self { id, text, lstrip: false, rstrip: false, single_word: false }
    }
}

/// A stretch of text, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segment<'t> {
    Text(&'t str),
    Control(TokenId),
}

/// All control tokens of a model.
///
/// Tokens of a single character are left out: a template's use of that character cannot be told
/// from a user's.
#[derive(Debug)]
pub(crate) struct ControlTokens {
    /// For each first byte, the tokens that start with it, longest first.
    by_first_byte: Vec<Vec<ControlToken>>,
}

impl ControlTokens {
    pub(crate) fn new(tokens: Vec<ControlToken>) -> Self {
        let mut by_first_byte = vec![Vec::new(); 256];
        for token in tokens.into_iter().filter(|token| token.text.chars().nth(1).is_some()) {
            by_first_byte[usize::from(token.text.as_bytes()[0])].push(token);
        }
        for bucket in &mut by_first_byte {
            bucket.sort_by_key(|token| std::cmp::Reverse(token.text.len()));
        }
        Self { by_first_byte }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ControlToken> {
        self.by_first_byte.iter().flatten()
    }

    /// The longest token whose text starts at byte `at` of `text`.
    pub(crate) fn at(&self, text: &str, at: usize) -> Option<&ControlToken> {
        let rest = &text.as_bytes()[at..];
        let bucket = &self.by_first_byte[usize::from(*rest.first()?)];
        bucket.iter().find(|token| rest.starts_with(token.text.as_bytes()))
    }

    /// Takes `text` apart: the leftmost token first, of those that start there the longest.
    pub(crate) fn split<'t>(&self, text: &'t str) -> Vec<Segment<'t>> {
        let mut segments = Vec::new();
        let (mut done, mut at) = (0, 0);
        while at < text.len() {
            let Some(token) = self.at(text, at).filter(|token| fits(token, text, at)) else {
                at += 1;
                continue;
            };
            let mut before = &text[done..at];
            if token.lstrip {
                before = before.trim_end();
            }
            if !before.is_empty() {
                segments.push(Segment::Text(before));
            }
            segments.push(Segment::Control(token.id));
            at += token.text.len();
            if token.rstrip {
                at = text.len() - text[at..].trim_start().len();
            }
            done = at;
        }
        if done < text.len() {
            segments.push(Segment::Text(&text[done..]));
        }
        segments
    }
}

/// Whether `token`, found at byte `at`, may stand there.
fn fits(token: &ControlToken, text: &str, at: usize) -> bool {
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    !token.single_word
        || (!is_word(text[..at].chars().next_back())
            && !is_word(text[at + token.text.len()..].chars().next()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(texts: &[&str]) -> ControlTokens {
        let plain = |(id, text): (usize, &&str)| ControlToken::plain(id as u32, text.to_string());
        ControlTokens::new(texts.iter().enumerate().map(plain).collect())
    }

    #[test]
    fn leftmost_then_longest() {
        let control = tokens(&["<a>", "<a><b>", "a><b"]);
        assert_eq!(
            control.split("x<a><b>é<a>"),
            [Segment::Text("x"), Segment::Control(1), Segment::Text("é"), Segment::Control(0),]
        );
        assert_eq!(control.split(""), []);
    }

    #[test]
    fn neighbours_decide() {
        let mut stripping = ControlToken::plain(7, "<s>".into());
        stripping.lstrip = true;
        stripping.rstrip = true;
        let mut word = ControlToken::plain(8, "stop".into());
        word.single_word = true;
        let control = ControlTokens::new(vec![stripping, word]);
        assert_eq!(
            control.split("a \n<s>\t b"),
            [Segment::Text("a"), Segment::Control(7), Segment::Text("b")]
        );
        assert_eq!(control.split("nonstop"), [Segment::Text("nonstop")]);
        assert_eq!(control.split("a stop")[1], Segment::Control(8));
    }

    #[test]
    fn single_characters_are_text() {
        assert_eq!(tokens(&["§"]).split("a§"), [Segment::Text("a§")]);
    }
}
