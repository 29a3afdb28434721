"""Child processes of a benchmark: each has a time limit, says why it failed, and is never left."""

import contextlib
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import time

LISTENS = "0A"
STARTS_WITHIN_S = 10


class Failed(Exception):
    """A row could not be measured. `said` is what the child wrote to its standard error."""

    def __init__(self, reason, said=""):
        last = said.strip().rpartition("\n")[2].strip()
        super().__init__(f"{reason}: {last}" if last else reason)
        self.said = said


class Child:
    """A process with a group of its own; leaving the `with` block ends the whole group."""

    def __init__(self, command, ucx=()):
        """`ucx` are variables for UCX; none are taken over from this process."""
        inherited = {name: value for name, value in os.environ.items()
                     if not name.startswith("UCX_")}
        self.name = pathlib.Path(command[0]).name
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=inherited | dict(ucx), start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.communicate()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self, timeout_s):
        """Standard output, once the process has ended well."""
        try:
            out, said = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            said = self.process.communicate()[1]
            raise Failed(f"{self.name} took longer than {timeout_s:g} s", said) from None
        if self.process.returncode != 0:
            raise Failed(f"{self.name} ended with status {self.process.returncode}", said or out)
        return out

    def wait_for_port(self, port):
        """Returns when something listens; connecting would use up a server that serves once."""
        until = time.monotonic() + STARTS_WITHIN_S
        while not is_listening(port):
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise Failed(f"{self.name} does not listen", self.process.communicate()[1])
            time.sleep(0.01)


def run(command, timeout_s, ucx=()):
    with Child(command, ucx) as child:
        return child.finish(timeout_s)


def children_cpu_s():
    """User and system time of all children that have been waited for so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def is_listening(port):
    sockets = "".join(pathlib.Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6")
                      if pathlib.Path(f"/proc/net/{table}").exists())
    return re.search(f":{port:04X} [0-9A-F]+:0000 {LISTENS} ", sockets) is not None
