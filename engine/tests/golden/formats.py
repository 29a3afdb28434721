#!/usr/bin/env python3
"""Writes formats.json: random blocks of every quantised GGUF type, and what they stand for.

The reference is `gguf.quants.dequantize` of the PyPI package gguf, by the authors of the format.
Blocks and values (little-endian f32) are hexadecimal.

Example: pip install gguf==0.19.0 && engine/tests/golden/formats.py
"""

import json
from pathlib import Path

import gguf
import numpy as np

# Where a block keeps its f16 numbers; the rest is random bytes.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "IQ4_NL": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def main() -> None:
    random = np.random.RandomState(20261129)
    formats = {}
    for name, halves in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = 2 if block_len == 256 else 4
        blocks = random.randint(0, 256, (count, block_bytes), dtype=np.uint8)
        for at in halves:
            numbers = random.uniform(-0.2, 0.2, (count, 1)).astype(np.float16)
            blocks[:, at : at + 2] = numbers.view(np.uint8)
        values = gguf.quants.dequantize(blocks, kind).astype("<f4")
        formats[name] = {"blocks": blocks.tobytes().hex(), "values": values.tobytes().hex()}
    path = Path(__file__).with_name("formats.json")
    path.write_text(json.dumps(formats, indent=0) + "\n")


if __name__ == "__main__":
    main()
