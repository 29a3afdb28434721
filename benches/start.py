#!/usr/bin/env python3
"""How long a decode node takes from exec to ready, and what it holds then.

Kinds of start, interleaved, since the machine's neighbours come and go; the least of each counts:
`first` packs the weights and writes them, `second` maps them, `off` packs into its own memory. What
is packed goes to a temporary folder. The model is in the page cache, as after any first use.

Example: benches/start.py --rounds 8
"""

import argparse
import http.client
import json
import pathlib
import signal
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
READY_WITHIN_S = 600


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def is_ready(port):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False


def start(binary, model, cache):
    """Seconds until ready, and MiB that are resident then."""
    port = free_port()
    command = [binary, "--model", model, "--grpc", f"127.0.0.1:{free_port()}",
               "--http", f"127.0.0.1:{port}", "--weights-cache", cache]
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() - began > READY_WITHIN_S:
                    raise SystemExit(f"the node did not become ready: {' '.join(command)}")
                time.sleep(0.002)
            seconds = time.monotonic() - began
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.send_signal(signal.SIGTERM)
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return seconds, int(resident.split()[1]) / 1024


def main():
    arguments = argparse.ArgumentParser(description=__doc__,
                                        formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default=ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf")
    arguments.add_argument("--binary", default=ROOT / "target/release/baton-decode")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments = arguments.parse_args()
    starts = {"first": [], "second": [], "off": []}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind, place in (("first", cache), ("second", cache), ("off", "off")):
                starts[kind].append(start(str(arguments.binary), str(arguments.model), place))
    print(json.dumps({
        kind: {"ready_s": round(min(seconds for seconds, _ in got), 3),
               "all_s": [round(seconds, 3) for seconds, _ in got],
               "resident_mib": round(max(mib for _, mib in got), 1)}
        for kind, got in starts.items()
    }, indent=1))


if __name__ == "__main__":
    main()
