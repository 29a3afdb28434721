"""Starts `baton up` once, on free ports, for the official OpenAI client to talk to."""

import json
import os
import pathlib
import signal
import subprocess
import time

import httpx
import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL_FILE = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BATON = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "baton"


class Server:
    def __init__(self, log_path):
        self.log_path = log_path
        self.log = open(log_path, "wb")
        self.process = subprocess.Popen(
            [
                BATON, "up", "--json", "--model", MODEL_FILE,
                "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--kv-pool-mib", "256",
            ],
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        line = self.process.stdout.readline()
        assert line, f"baton up ended early:\n{log_path.read_text()}"
        self.ready = json.loads(line)
        self.url = self.ready["http"]

    def metric(self, name):
        """The sum over all series of one metric of the router."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")
                 or line.startswith(name + " ")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def running(self):
        """Requests and KV blocks that the cluster holds."""
        out = subprocess.run(
            [BATON, "status", "--json", "--endpoint", self.ready["grpc"]],
            check=True, capture_output=True, timeout=30,
        )
        status = json.loads(out.stdout)
        return status["running_requests"] + sum(
            node["running"] + node["waiting"] + node["kv_blocks_used"] for node in status["nodes"]
        )

    def wait_until_idle(self, seconds=5.0):
        deadline = time.monotonic() + seconds
        while self.running() > 0:
            assert time.monotonic() < deadline, "blocks or requests are still held"
            time.sleep(0.05)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout=40)
        self.log.close()
        return code


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("baton") / "baton.log")
    yield server
    server.wait_until_idle()
    assert server.stop() == 0, "Ctrl-C must end baton with 0"
    assert "panicked" not in server.log_path.read_text()


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def model(server):
    return server.ready["model"]
