#!/usr/bin/env python3
"""Mooncake's transfer engine over TCP between two processes on one machine; prints one JSON line.

A request is one call of `batch_transfer_sync_write` with a list of messages; several at once come
from as many threads. The two find each other by Mooncake's own handshake, without a metadata
server. Needs `pip install mooncake-transfer-engine-non-cuda numpy`, or the build for CUDA where
CUDA is installed.

Example: benches/transfer_mooncake.py --message 1048576 --in-flight 4
"""

import concurrent.futures
import importlib.metadata
import itertools
import sys

import transfer_pair as pair

PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


def engine_with(arena):
    from mooncake.engine import TransferEngine
    engine = TransferEngine()
    status = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    if status == 0:
        status = engine.register_memory(arena.ctypes.data, arena.nbytes)
    if status != 0:
        raise RuntimeError(f"Mooncake does not start: status {status}")
    return engine


def be_target(pipe, options):
    """Offers an arena until the initiator says that it is through; answers with a sample of it."""
    arena = pair.arena(filled=False)
    engine = engine_with(arena)
    pipe.send((engine.get_rpc_port(), arena.ctypes.data))
    pipe.recv()
    pipe.send_bytes(pair.sample(arena, options))
    pipe.recv()


class Initiator:
    def __init__(self, pipe, options):
        self.arena = pair.arena(filled=True)
        self.engine = engine_with(self.arena)
        port, address = pipe.recv()
        self.target = f"127.0.0.1:{port}"
        self.in_flight = options.in_flight
        self.requests = []
        for indices in pair.requests(options):
            places = [index * options.message for index in indices]
            self.requests.append(([self.arena.ctypes.data + at for at in places],
                                  [address + at for at in places],
                                  [options.message] * len(places)))

    def transfer(self, count):
        """Moves so many requests, the prepared ones in turn, and waits for all of them."""
        turns = itertools.islice(itertools.cycle(self.requests), count)
        if self.in_flight == 1:
            for request in turns:
                self.write(request)
            return
        with concurrent.futures.ThreadPoolExecutor(self.in_flight) as threads:
            for _ in threads.map(self.write, turns):
                pass

    def write(self, request):
        status = self.engine.batch_transfer_sync_write(self.target, *request)
        if status != 0:
            raise RuntimeError(f"a request failed: Mooncake's status {status}")


def version():
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def main():
    options = pair.parser(__doc__).parse_args()
    with pair.target(be_target, options) as (pipe, pid):
        initiator = Initiator(pipe, options)
        row = pair.measure(initiator.transfer, pid, options)
        pipe.send("sample")
        if pipe.recv_bytes() != pair.sample(initiator.arena, options):
            sys.exit("the arenas differ after the transfer")
    pair.show({"peer": "mooncake", "version": version(), "operation": "write"} | row)


if __name__ == "__main__":
    main()
