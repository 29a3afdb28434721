"""`baton up`: the block that it prints, and the line in it to paste."""

import json
import shlex
import signal
import subprocess

from conftest import BATON, MODEL_FILE


def start(*flags):
    return subprocess.Popen(
        [BATON, "up", "--model", MODEL_FILE, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
         "--kv-pool-mib", "64", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )


def test_the_printed_curl_line_answers():
    process = start()
    try:
        line = next(line.strip() for line in process.stdout if line.strip().startswith("curl "))
        reply = json.loads(subprocess.check_output([*shlex.split(line), "-sS", "--max-time", "60"]))
        assert "Gravity is a fundamental" in reply["choices"][0]["message"]["content"]
        streamed = shlex.split(line)
        streamed[-1] = json.dumps(json.loads(streamed[-1]) | {"stream": True})
        events = subprocess.check_output([*streamed, "-sSN", "--max-time", "60"], text=True)
        data = [line.removeprefix("data: ") for line in events.splitlines() if line]
        assert data.pop() == "[DONE]"
        text = "".join(json.loads(one)["choices"][0]["delta"].get("content", "") for one in data)
        assert text == reply["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=40) == 0, process.stderr.read()


def test_a_taken_port_is_named():
    first = start("--json")
    try:
        taken = json.loads(first.stdout.readline())["http"].removeprefix("http://")
        second = subprocess.run(
            [BATON, "up", "--model", MODEL_FILE, "--http", taken, "--grpc", "127.0.0.1:0"],
            capture_output=True, text=True, timeout=60,
        )
        assert second.returncode != 0
        assert taken in second.stderr and "free the port" in second.stderr
    finally:
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=40) == 0


def test_a_missing_model_is_named():
    done = subprocess.run([BATON, "up", "--model", "no/such.gguf"], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode != 0 and "no/such.gguf" in done.stderr
