//! The patterns behind the names of `tokenizer.ggml.pre`, as the families' own `tokenizer.json`
//! state them.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer as HfTokenizer,
};

use crate::TokenizerError;

/// How a family cuts text before BPE.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    steps: &'static [Step],
    is_nfc: bool,
    /// A word that is a token is not put together from its merges.
    pub(super) ignores_merges: bool,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Each match, and each stretch between matches, is a word.
    Split(&'static str),
    /// Each digit by itself.
    Digits,
    /// GPT-2's own pattern.
    Gpt2,
}

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const fn plain(names: &'static [&'static str], steps: &'static [Step]) -> PreTokenizer {
    PreTokenizer { names, steps, is_nfc: false, ignores_merges: false }
}

static KNOWN: &[PreTokenizer] = &[
    plain(&["gpt-2", "default", "phi-2", "mpt", "olmo"], &[Step::Gpt2]),
    plain(&["smollm", "starcoder", "refact", "codeshell"], &[Step::Digits, Step::Gpt2]),
    PreTokenizer {
        ignores_merges: true,
        ..plain(&["llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"], &[Step::Split(LLAMA3)])
    },
    plain(&["dbrx", "smaug-bpe"], &[Step::Split(LLAMA3)]),
    PreTokenizer { is_nfc: true, ..plain(&["qwen2"], &[Step::Split(QWEN2)]) },
    plain(&["deepseek-r1-qwen"], &[Step::Split(QWEN2)]),
    PreTokenizer { ignores_merges: true, ..plain(&["tekken"], &[Step::Split(TEKKEN)]) },
    plain(&["gpt-4o", "llama4"], &[Step::Split(GPT4O)]),
    plain(
        &["deepseek-v3"],
        &[
            Step::Split(r"\p{N}{1,3}"),
            Step::Split("[一-龥\u{3040}-ゟ゠-ヿ]+"),
            Step::Split(DEEPSEEK_V3),
        ],
    ),
];

impl PreTokenizer {
    /// Without a name it is GPT-2's, which is what files without one were made for.
    ///
    /// # Errors
    /// For names that are not in the table.
    pub(super) fn named(name: Option<&str>) -> Result<Self, TokenizerError> {
        let name = name.unwrap_or("gpt-2");
        let found = KNOWN.iter().find(|pre| pre.names.contains(&name));
        found.copied().ok_or_else(|| TokenizerError::UnknownPreTokenizer {
            name: name.to_owned(),
            known: KNOWN.iter().flat_map(|pre| pre.names).copied().collect::<Vec<_>>().join(", "),
        })
    }

    /// # Panics
    /// Never: a test builds every pattern of the table.
    pub(super) fn install(&self, tokenizer: &mut HfTokenizer) {
        if self.is_nfc {
            tokenizer.with_normalizer(Some(NormalizerWrapper::NFC(NFC)));
        }
        let has_own_pattern = self.steps.iter().any(|step| matches!(step, Step::Gpt2));
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        for step in self.steps {
            match step {
                Step::Split(pattern) => steps.push(split(pattern).into()),
                Step::Digits => steps.push(Digits::new(true).into()),
                Step::Gpt2 => {}
            }
        }
        steps.push(ByteLevel::new(false, true, has_own_pattern).into());
        tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
    }
}

fn split(pattern: &str) -> Split {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .expect("the table's patterns are regular expressions")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

    fn words(name: &str, text: &str) -> Vec<String> {
        let mut tokenizer = HfTokenizer::new(tokenizers::models::bpe::BPE::default());
        PreTokenizer::named(Some(name)).unwrap().install(&mut tokenizer);
        let mut cut = PreTokenizedString::from(text);
        tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut cut).unwrap();
        cut.get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(_, (start, end), _)| text[start..end].to_owned())
            .collect()
    }

    #[test]
    fn every_pattern_cuts() {
        for name in KNOWN.iter().flat_map(|pre| pre.names) {
            assert_eq!(words(name, "I'm 漢字 x").concat(), "I'm 漢字 x", "{name}");
        }
        assert_eq!(words("gpt-2", "it's 1234  x"), ["it", "'s", " 1234", " ", " x"]);
        assert_eq!(words("smollm", "a 123"), ["a", " ", "1", "2", "3"]);
        assert_eq!(
            words("llama-bpe", "It'S 12345\n\n x"),
            ["It", "'S", " ", "123", "45", "\n\n", " x"]
        );
        assert_eq!(words("dbrx", "a 12345"), ["a", " ", "123", "45"]);
        assert_eq!(words("qwen2", "v12"), ["v", "1", "2"]);
        assert_eq!(words("tekken", "HelloWorld ab/"), ["Hello", "World", " ab", "/"]);
        assert_eq!(words("gpt-4o", "Don'T go"), ["Don'T", " go"]);
        assert_eq!(words("deepseek-v3", "a漢字_x 1234"), ["a", "漢字", "_x", " ", "123", "4"]);
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        let error = PreTokenizer::named(Some("klingon")).unwrap_err().to_string();
        assert!(error.contains("`klingon`") && error.contains("smollm"), "{error}");
    }
}
