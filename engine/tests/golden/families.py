"""Writes `families/*/`: a tiny random model of each family, and its logits by transformers.

    python -m venv venv && venv/bin/pip install torch transformers gguf safetensors
    venv/bin/python families.py

A folder holds the model twice, with the same bfloat16 weights: as Hugging Face writes it
(`config.json`, `model.safetensors`) and as llama.cpp's converter does (`model.gguf`). The logits in
`golden.json` are those of transformers in float32 with eager attention: `exact` as they are, and
`bf16_kv` with K and V rounded to bfloat16 before attention, as Baton's contract says.
"""

import json
import math
import pathlib
import sys

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

OUT = pathlib.Path(__file__).parent / "families"
TOKENS = 600
ROWS = [0, 1, 2, 17, 47, 48, 100, 255, 256, 257, 303, 355, 400, 511, 512, 599]
BASE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 48, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
# Folder: class of the configuration, GGUF architecture and pre-tokenizer, what is not as in BASE.
FAMILIES = {
    "llama3": ("Llama", "llama", "llama-bpe", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "mistral": ("Mistral", "llama", "tekken", {"sliding_window": 40}),
    "qwen2": ("Qwen2", "qwen2", "qwen2", {"head_dim": None, "hidden_size": 64}),
    "qwen3": ("Qwen3", "qwen3", "qwen2", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", "gemma3", "gpt-2", {
        "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 32, "sliding_window": 48, "query_pre_attn_scalar": 16,
        "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }),
    "phi3": ("Phi3", "phi3", "gpt-2", {
        "head_dim": None, "hidden_size": 64, "sliding_window": 60, "partial_rotary_factor": 0.5,
    }),
    "mixtral": ("Mixtral", "llama", "gpt-2", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
        "intermediate_size": 32, "rope_theta": 1000000.0,
    }),
    "qwen3moe": ("Qwen3Moe", "qwen3moe", "qwen2", {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "decoder_sparse_step": 1,
    }),
}


def make_model(family, changes, seed):
    fields = {k: v for k, v in (BASE | changes).items() if v is not None or k != "head_dim"}
    config = getattr(transformers, family + "Config")(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    is_gemma = family.startswith("Gemma")
    for name, x in model.named_parameters():
        if x.ndim == 1:
            centre = 0.0 if is_gemma or name.endswith("bias") else 1.0
            x.data = centre + 0.2 * torch.randn_like(x)
        else:
            wide = 4.0 if ".gate.weight" in name else 1.5
            x.data = wide / math.sqrt(x.shape[-1]) * torch.randn_like(x)
        x.data = x.data.bfloat16().float()
    return model.eval()


def logits(model, tokens, is_rounded):
    module = sys.modules[type(model).__module__]
    eager = module.eager_attention_forward

    def rounded(layer, q, k, v, mask, **rest):
        return eager(layer, q, k.bfloat16().float(), v.bfloat16().float(), mask, **rest)

    module.eager_attention_forward = rounded if is_rounded else eager
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    module.eager_attention_forward = eager
    return {row: [round(float(x), 6) for x in out[row]] for row in ROWS}


def permute(x, heads):
    """As llama.cpp's converter orders the rows of Q and K of the architecture `llama`."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def llama3_factors(config):
    dim, out = config["head_dim"], []
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / dim)
        turns = LLAMA3["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(out, np.float32)


def write_keys(writer, arch, pre, config):
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config["head_dim"] or hidden // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    elif "rope_scaling" in config:
        original = LLAMA3["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([chr(0x21 + i) for i in range(config["vocab_size"])])
    writer.add_token_types([1] * config["vocab_size"])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def merge_experts(weights):
    """Experts of a layer as one tensor, under the name that the converter gives it."""
    merged, experts = {}, {}
    for name, x in weights.items():
        if ".experts." not in name:
            merged[name] = x
            continue
        before, after = name.split(".experts.")
        expert, part = after.split(".", 1)
        experts.setdefault(f"{before}.experts.{part}", {})[int(expert)] = x
    for name, parts in experts.items():
        merged[name] = np.stack([parts[i] for i in range(len(parts))])
    return merged


def write_gguf(path, arch, pre, config, weights):
    writer = gguf.GGUFWriter(path, arch)
    write_keys(writer, arch, pre, config)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    if arch == "llama" and "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    for name, x in merge_experts(weights).items():
        if arch == "llama" and name.endswith("q_proj.weight"):
            x = permute(x, config["num_attention_heads"])
        if arch == "llama" and name.endswith("k_proj.weight"):
            x = permute(x, config["num_key_value_heads"])
        if arch == "gemma3" and name.endswith("norm.weight"):
            x = x + np.float32(1)
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if x.ndim == 1 or "ffn_gate_inp" in to:
            writer.add_tensor(to, x)
        else:
            bf16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(to, gguf.quants.quantize(x, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    for seed, (folder, (family, arch, pre, changes)) in enumerate(FAMILIES.items()):
        out = OUT / folder
        out.mkdir(parents=True, exist_ok=True)
        model = make_model(family, changes, seed)
        tokens = np.random.default_rng(seed).integers(0, BASE["vocab_size"], TOKENS).tolist()
        golden = {
            "tokens": tokens,
            "exact": logits(model, tokens, False),
            "bf16_kv": logits(model, tokens, True),
        }
        (out / "golden.json").write_text(json.dumps(golden) + "\n")
        model.bfloat16().save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
        (out / "tokenizer.json").write_text("{}\n")
        stored = load_file(out / "model.safetensors")
        weights = {name: x.float().numpy() for name, x in stored.items()}
        write_gguf(out / "model.gguf", arch, pre, BASE | changes, weights)
        apart = max(
            abs(a - b) for row in ROWS
            for a, b in zip(golden["exact"][row], golden["bf16_kv"][row])
        )
        print(f"{folder}: {len(stored)} tensors, exact and bf16_kv differ by {apart:.4f}")


main()
