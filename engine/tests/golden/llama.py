"""Writes `llama/`: a tiny random Llama as safetensors, and its logits in f64 with plain numpy.

    python llama.py

An implementation of its own, after Hugging Face's modeling_llama: untied head, grouped queries,
Llama 3's RoPE scaling. As Baton's contract says, K (rotated) and V are rounded to bfloat16 before
attention; nothing else is rounded.

Also with StreamingLLM: at each token the keys that are left in the cache are rotated anew, to where
they stand in it (their rounded values, turned back first).
"""

import json
import math
import pathlib
import struct

import numpy as np

OUT = pathlib.Path(__file__).parent / "llama"
SINKS, WINDOW = 4, 60
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, DIM, VOCAB, TOKENS = 32, 64, 2, 4, 2, 16, 48, 300
EPS, THETA = 1e-5, 10000.0
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def bf16(x):
    """Nearest bfloat16, ties to even, as f64."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def make_weights():
    rng = np.random.default_rng(1)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    norms = ["model.norm"]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        norms += [at + "input_layernorm", at + "post_attention_layernorm"]
        shapes[at + "self_attn.q_proj"] = (HEADS * DIM, HIDDEN)
        shapes[at + "self_attn.k_proj"] = (KV_HEADS * DIM, HIDDEN)
        shapes[at + "self_attn.v_proj"] = (KV_HEADS * DIM, HIDDEN)
        shapes[at + "self_attn.o_proj"] = (HIDDEN, HEADS * DIM)
        shapes[at + "mlp.gate_proj"] = (FFN, HIDDEN)
        shapes[at + "mlp.up_proj"] = (FFN, HIDDEN)
        shapes[at + "mlp.down_proj"] = (HIDDEN, FFN)
    weights = {n: bf16(rng.normal(0, 1.5 / math.sqrt(s[1]), s)) for n, s in shapes.items()}
    weights |= {n: bf16(1 + 0.2 * rng.normal(size=HIDDEN)) for n in norms}
    return weights, rng.integers(0, VOCAB, TOKENS)


def frequencies():
    out = []
    for i in range(DIM // 2):
        freq = THETA ** (-2 * i / DIM)
        turns = SCALING["original_max_position_embeddings"] * freq / (2 * math.pi)
        low, high = SCALING["low_freq_factor"], SCALING["high_freq_factor"]
        if turns < low:
            freq /= SCALING["factor"]
        elif turns <= high:
            smooth = (turns - low) / (high - low)
            freq = (1 - smooth) * freq / SCALING["factor"] + smooth * freq
        out.append(freq)
    return np.array(out)


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotate(x, positions=None):
    positions = np.arange(x.shape[0]) if positions is None else positions
    angles = positions[:, None, None] * frequencies()
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def softmax(scores):
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def streaming_attention(x, w, at):
    project = lambda name, heads: (x @ w[at + f"self_attn.{name}"].T).reshape(-1, heads, DIM)
    q, k, v = project("q_proj", HEADS), project("k_proj", KV_HEADS), project("v_proj", KV_HEADS)
    k, v = rotate(bf16(rotate(k)), -np.arange(len(x))), bf16(v)
    k, v = (np.repeat(z, HEADS // KV_HEADS, axis=1) for z in (k, v))
    rows = []
    for t in range(len(x)):
        cache = [i for i in range(t + 1) if i < SINKS or i > t - WINDOW]
        places = np.arange(len(cache))
        keys, query = rotate(k[cache], places), rotate(q[t : t + 1], places[-1:])
        p = softmax(np.einsum("qhd,khd->hqk", query, keys) / math.sqrt(DIM))
        rows.append(np.einsum("hqk,khd->qhd", p, v[cache]).reshape(-1))
    return np.array(rows) @ w[at + "self_attn.o_proj"].T


def attention(x, w, at):
    project = lambda name, heads: (x @ w[at + f"self_attn.{name}"].T).reshape(-1, heads, DIM)
    q = rotate(project("q_proj", HEADS))
    k, v = bf16(rotate(project("k_proj", KV_HEADS))), bf16(project("v_proj", KV_HEADS))
    k, v = (np.repeat(z, HEADS // KV_HEADS, axis=1) for z in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(x), -1) @ w[at + "self_attn.o_proj"].T


def logits(w, tokens, attention=attention):
    x = w["model.embed_tokens"][tokens]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        x = x + attention(norm(x, w[at + "input_layernorm"]), w, at)
        y = norm(x, w[at + "post_attention_layernorm"])
        gate, up = y @ w[at + "mlp.gate_proj"].T, y @ w[at + "mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj"].T
    return norm(x, w["model.norm"]) @ w["lm_head"].T


def write_safetensors(path, weights):
    header, data = {}, b""
    for name, x in weights.items():
        raw = (x.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name + ".weight"] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main():
    OUT.mkdir(exist_ok=True)
    weights, tokens = make_weights()
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": DIM,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 512,
        "rms_norm_eps": EPS, "rope_theta": THETA, "rope_scaling": SCALING,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }
    (OUT / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (OUT / "tokenizer.json").write_text("{}\n")
    write_safetensors(OUT / "model.safetensors", weights)
    result = logits(weights, tokens)
    rows = [0, 1, 2, 17, 100, 255, 256, 257, TOKENS - 1]
    golden = {"tokens": tokens.tolist(), "logits": {r: result[r].round(6).tolist() for r in rows}}
    result = logits(weights, tokens, streaming_attention)
    rows = [SINKS + WINDOW - 1, SINKS + WINDOW, 100, 255, 256, 270, TOKENS - 1]
    golden["streaming"] = {
        "sinks": SINKS, "window": WINDOW, "logits": {r: result[r].round(6).tolist() for r in rows}
    }
    (OUT / "golden.json").write_text(json.dumps(golden) + "\n")


main()
