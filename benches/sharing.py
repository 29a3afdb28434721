#!/usr/bin/env python3
"""What a prefill node at full load and a decode node beside it take from one another.

Serves a model with `baton up`, which splits the cores between the two nodes, and measures in turns,
round after round: a stream of tokens alone, prompts one after the other alone, and both at once.
Prints how much of its speed each keeps. Uses only the standard library.

Example: benches/sharing.py --rounds 5
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATON = ROOT / "target" / "release" / "baton"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
KEPT = 0.85


class Server:
    def __init__(self, model, log):
        self.process = subprocess.Popen(
            [BATON, "up", "--json", "--model", model, "--http", "127.0.0.1:0",
             "--grpc", "127.0.0.1:0", "--local-prefill-max-tokens", "0"],
            stdout=subprocess.PIPE, stderr=log)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"baton up ended early:\n{pathlib.Path(log.name).read_text()}")
        self.url = json.loads(line)["http"]
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def complete(self, prompt, tokens):
        """Seconds between the first token and the last, and of all; tokens of the prompt."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
                "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        start, first, last, usage = time.monotonic(), None, None, None
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if event["choices"]:
                    last = time.monotonic()
                    first = first or last
        return last - first, time.monotonic() - start, usage


def stream_rate(server, tokens):
    seconds, _, usage = server.complete("Count up: one, two, three,", tokens)
    return (usage["completion_tokens"] - 1) / seconds


class Prompts:
    """Prompts that share no prefix, one after the other."""

    def __init__(self, server, words):
        self.server, self.words, self.count = server, words, 0

    def prefill(self):
        """Tokens and seconds of one prompt."""
        self.count += 1
        text = f"{self.count} {time.monotonic_ns()} " + "the quick brown fox jumps " * self.words
        _, seconds, usage = self.server.complete(text, 1)
        return usage["prompt_tokens"], seconds

    def rate(self, seconds):
        return self.until(lambda elapsed: elapsed >= seconds)

    def until(self, is_over):
        """Tokens in a second until `is_over(elapsed seconds)`, whole prompts only."""
        start, tokens, last = time.monotonic(), 0, 0
        while not is_over(time.monotonic() - start):
            tokens += self.prefill()[0]
            last = time.monotonic() - start
        return tokens / last


def both(server, prompts, tokens):
    """Both rates at once: prompts go on for as long as the stream does."""
    over, rates = threading.Event(), []
    work = threading.Thread(target=lambda: rates.append(prompts.until(lambda _: over.is_set())))
    work.start()
    rate = stream_rate(server, tokens)
    over.set()
    work.join()
    return rate, rates[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--tokens", type=int, default=1000, help="of the stream")
    parser.add_argument("--words", type=int, default=200, help="times five: length of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="folder of sharing.json")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = []
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        server = Server(options.model, log)
        try:
            prompts = Prompts(server, options.words)
            stream_rate(server, 50)
            prompts.prefill()
            for at in range(options.rounds):
                print(f"round {at + 1} of {options.rounds}", file=sys.stderr)
                decode = stream_rate(server, options.tokens)
                prefill = prompts.rate(options.tokens / decode)
                decode_beside, prefill_beside = both(server, prompts, options.tokens)
                rounds.append({"decode": decode, "decode_beside": decode_beside,
                               "prefill": prefill, "prefill_beside": prefill_beside})
        finally:
            server.process.terminate()
            server.process.wait()
    report = {"rounds": rounds}
    for phase in ("prefill", "decode"):
        kept = [round_[f"{phase}_beside"] / round_[phase] for round_ in rounds]
        alone = statistics.median(round_[phase] for round_ in rounds)
        report[phase] = {"alone_tokens_per_s": alone, "kept": statistics.median(kept)}
        if not options.json:
            mark = "" if report[phase]["kept"] >= KEPT else "  below its floor"
            print(f"{phase:<7} {alone:>7.0f} t/s alone, keeps {report[phase]['kept']:.0%} beside the "
                  f"other ({min(kept):.0%}–{max(kept):.0%}; floor {KEPT:.0%}){mark}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sharing.json").write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
