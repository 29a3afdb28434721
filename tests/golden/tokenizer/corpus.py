"""Texts and conversations that the golden files cover; see make.py."""

GPL = """The licenses for most software and other practical works are designed
to take away your freedom to share and change the works.  By contrast,
the GNU General Public License is intended to guarantee your freedom to
share and change all versions of a program--to make sure it remains free
software for all its users.  We, the Free Software Foundation, use the
GNU General Public License for most of our software; it applies also to
any other work released this way by its authors.  You can apply it to
your programs, too."""

RUST = '''fn main() {
    let xs: Vec<u64> = (0..10).map(|x| x << 2).collect();
\tprintln!("{:?} {}", xs, 0xFF_u8 as f32 / 3.0e-7);
}
'''

PYTHON = '''class A(object):
    """doc"""

    def __init__(self, *, n=10_000):
        self.n = n  # it's, we'll, they've, I'm, he'd, isn't, you're
        return None if not n else [i for i in range(n) if i % 2 == 0]
'''

TEXTS = {
    "empty": "",
    "one letter": "a",
    "one space": " ",
    "hello": "Hello, world!",
    "prose": GPL,
    "rust": RUST,
    "python": PYTHON,
    "json": '{"a": [1, 2.5, -3e10], "b": {"c": null, "d": "\\u00e9\\n"}}',
    "html": "<p class='x'>a &amp; b</p><br/><!-- c -->",
    "shell": "for f in *.txt; do mv -- \"$f\" \"${f%.txt}.md\"; done && echo $? | tee >/dev/null",
    "contractions": "I'm we'll they've HE'D don'T it’s 'tis",
    "digits": "0 1 12 123 1234 12345 3.14159 1,000,000 2024-02-29T13:05:09Z +49-30-123456",
    "other digits": "٠١٢٣٤٥ ०१२३ ⅷ ½ ² ₃ ①②③ 𝟘𝟙 一二三",
    "chinese": "人工智能正在改变世界。我们生活在一个快速变化的时代，需要不断学习。",
    "japanese": "吾輩は猫である。名前はまだ無い。カタカナ、ひらがな、漢字、ｶﾀｶﾅ。",
    "korean": "안녕하세요. 만나서 반갑습니다. 오늘 날씨가 좋네요!",
    "thai": "สวัสดีครับ ยินดีต้อนรับ",
    "hindi": "नमस्ते दुनिया, आप कैसे हैं?",
    "arabic": "مرحبا بالعالم، كيف حالك اليوم؟",
    "hebrew": "שלום עולם! מה שלומך?",
    "bidi": "abc \u202eשלום\u202c def \u2067مرحبا\u2069 \u200f!",
    "cyrillic": "Привет, мир! Съешь же ещё этих мягких французских булок.",
    "greek": "Καλημέρα κόσμε· ΣΊΣΥΦΟΣ",
    "german": "Übergrößenträger fraßen heiße Würstchen.",
    "vietnamese": "Tiếng Việt có nhiều dấu thanh.",
    "combining": "e\u0301 n\u0303 a\u0308\u0301 Z\u0351\u036b\u0343\u0312a\u0334l\u0335g\u0336o\u0337 \u0301alone",
    "normal forms": "\u00e9 e\u0301 \ufb01 fi \u212b \u00c5 A\u030a \uff21\uff22",
    "emoji": "😀😃😄 👍🏽 ❤️ ☕ 🚀 1️⃣ ©️",
    "emoji joined": "👨‍👩‍👧‍👦 👩🏽‍💻 🏳️‍🌈 🧑‍🚀 👁️‍🗨️",
    "flags": "🇩🇪🇫🇷🇯🇵🇺🇸 🇩 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "math": "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ∑_{i=0}^{∞} 2^{-i} = 2 ≠ ≈ → ⇒ √2 ∂f/∂x",
    "box": "┌──┬──┐\n│ a│ b│\n└──┴──┘ ░▒▓█",
    "spaces": "a b  c   d    e     f      g       h        i" + " " * 17 + "j" + " " * 64 + "k",
    "leading spaces": "   leading",
    "trailing spaces": "trailing   ",
    "only spaces": " " * 33,
    "tabs": "\ta\t\tb\t \tc \t d\t\t\t\t",
    "newlines": "a\nb\n\nc\n\n\nd\n\n\n\n\n\n\n\n\ne\n \n  \n\t\nf\n",
    "crlf": "a\r\nb\r\n\r\nc\rd\r\re\n\rf",
    "odd spaces": "a\u00a0b\u00a0\u00a0c\u2003d\u2009e\u202ff\u3000g\u2028h\u2029i\u0085j\u000bk\u000cl\ufeffm\u200bn",
    "controls": "".join(chr(c) for c in range(32)) + "\x7f\x80\x9f",
    "ascii": "".join(chr(c) for c in range(32, 127)),
    "latin-1": "".join(chr(c) for c in range(0xA0, 0x100)),
    "replacement": "\ufffd \ufffd\ufffda\ufffd",
    "noncharacters": "\ufdd0\ufdefa\uffff\U0010ffff\ue000\U000f0000",
    "run of a": "a" * 1000,
    "run of digits": "1234567890" * 50,
    "run of !": "!" * 333,
    "run of han": "的" * 200,
    "run of emoji": "🙂" * 50,
    "run of accents": "e" + "\u0301" * 100,
    "punctuation": "...---***___===~~~///\\\\\\|||(((({{{[[[<<<>>>]]]}}}))))????!!!!;;;;::::,,,,''''````\"\"\"\"",
    "url": "https://user:p%40ss@example.com:8080/a/b.c?q=1&r=%20#frag mailto:a.b+c@d-e.org",
    "base64": "TWFuIGlzIGRpc3Rpbmd1aXNoZWQsIG5vdCBvbmx5IGJ5IGhpcyByZWFzb24sIGJ1dCA=",
    "mixed scripts": "aбγ漢かم1a②é🙂x",
    "camel": "camelCaseHTTPServer2Go snake_case_name kebab-case-name SCREAMING_CASE",
    "control by name": "<|im_start|>user\nHi<|im_end|><|endoftext|>",
    "control in words": "a<|im_end|>b <repo_name>x<|im_start|><|im_start|> <filename> <empty_output>",
    "control in part": "<|im_start| <|im_ |im_end|> <|<|im_end|>|> <|im_end|",
}

CONVERSATIONS = {
    "user only": [("user", "Hello!")],
    "system": [("system", "Be brief."), ("user", "What is 2+2?")],
    "turns": [
        ("system", "You are a pirate."),
        ("user", "Hi"),
        ("assistant", "Arr!"),
        ("user", "How are you?\n\n  Tell me."),
    ],
    "unicode": [("user", "漢字 😀 e\u0301 مرحبا\u00a0\r\n\tx")],
    "empty content": [("system", ""), ("user", ""), ("assistant", ""), ("user", " ")],
    "white space": [("user", "  \n a \n "), ("assistant", "\n"), ("user", "b\n\n")],
    "other role": [("tool", "{\"a\": 1}"), ("user", "ok")],
    "angle brackets": [("user", "if a < b && c > d: <tag> <| |> <"), ("assistant", "> quote")],
}

SPM_TRAINING = [GPL, RUST, PYTHON, TEXTS["german"], TEXTS["cyrillic"], "hello world hello"]

SPM_TEXTS = {
    "empty": "",
    "hello": "hello world",
    "leading space": " hello",
    "spaces": "a  b   c    " + " " * 20 + "d ",
    "newlines": "\n\na\n b\r\n\tc",
    "prose": GPL[:200],
    "unseen": "漢字 😀 é ▁▁ ﷐",
    "bytes by name": "<0x41> <0xE2> <unk>",
    "control by name": "<s>hello</s> [INST] x [/INST]",
}

SPM_CONTROL = {
    "chat": "<s>[INST] hello world [/INST] hi</s>",
    "adjacent": "<s><s>hello</s></s>",
    "spaces": "<s> hello </s> hello",
}
