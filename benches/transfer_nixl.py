#!/usr/bin/env python3
"""NIXL's UCX backend between two processes on one machine; prints one JSON line.

A request is a list of descriptors, one for each message, prepared beforehand and never merged. UCX
is configured by its environment, as in UCX_TLS=tcp. Needs `pip install nixl-cu12 numpy`.

Without a progress thread both sides poll as fast as they can, NIXL's fastest mode; with one, which
is NIXL's default, the initiator asks for a request's state every --poll-us and the target sleeps.

Example: UCX_TLS=tcp benches/transfer_nixl.py --operation write --message 1048576 --in-flight 4
"""

import collections
import importlib.metadata
import itertools
import os
import sys
import time

import transfer_pair as pair

POLLS_BETWEEN_LOOKS = 64


def agent_named(name, progress_thread):
    from nixl_cu12._api import nixl_agent, nixl_agent_config
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread,
                                              backends=["UCX"]))


def be_target(pipe, options):
    """Offers an arena until the initiator says that it is through; answers with a sample of it."""
    arena = pair.arena(filled=options.operation == "read")
    agent = agent_named("target", options.progress_thread)
    agent.register_memory([(arena.ctypes.data, arena.nbytes, 0, "kv")], "DRAM")
    pipe.send((agent.get_agent_metadata(), arena.ctypes.data))
    pipe.recv()
    while not options.progress_thread and not pipe.poll():
        for _ in range(POLLS_BETWEEN_LOOKS):
            agent.get_new_notifs()
    pipe.recv()
    pipe.send_bytes(pair.sample(arena, options))
    pipe.recv()


class Initiator:
    def __init__(self, pipe, options):
        self.arena = pair.arena(filled=options.operation == "write")
        self.agent = agent_named("initiator", options.progress_thread)
        self.agent.register_memory([(self.arena.ctypes.data, self.arena.nbytes, 0, "kv")], "DRAM")
        metadata, address = pipe.recv()
        ours = self.descriptors("NIXL_INIT_AGENT", self.arena.ctypes.data, options.message)
        theirs = self.descriptors(self.agent.add_remote_agent(metadata), address, options.message)
        self.requests = [
            self.agent.make_prepped_xfer(options.operation.upper(), ours, indices, theirs, indices,
                                         b"done", skip_desc_merge=True)
            for indices in pair.requests(options)]
        self.in_flight = options.in_flight
        self.poll_s = options.poll_us / 1e6

    def descriptors(self, agent_name, address, message):
        return self.agent.prep_xfer_dlist(
            agent_name, [(address + at, message, 0)
                         for at in range(0, pair.ARENA_BYTES - message + 1, message)], "DRAM")

    def transfer(self, count):
        """Moves so many requests, the prepared ones in turn, and waits for all of them."""
        under_way = collections.deque()
        for request in itertools.islice(itertools.cycle(self.requests), count):
            if len(under_way) == self.in_flight:
                self.wait(under_way.popleft())
            if self.agent.transfer(request) == "ERR":
                raise RuntimeError("NIXL refused a request")
            under_way.append(request)
        for request in under_way:
            self.wait(request)

    def wait(self, request):
        while (state := self.agent.check_xfer_state(request)) != "DONE":
            if state == "ERR":
                raise RuntimeError("NIXL reported that a request failed")
            if self.poll_s:
                time.sleep(self.poll_s)


def main():
    parser = pair.parser(__doc__)
    parser.add_argument("--operation", choices=["write", "read"], default="write")
    parser.add_argument("--progress-thread", action="store_true", help="on both sides")
    parser.add_argument("--poll-us", type=int, default=0, metavar="N",
                        help="sleep between looks at a request's state; 0: none")
    options = parser.parse_args()
    with pair.target(be_target, options) as (pipe, pid):
        initiator = Initiator(pipe, options)
        pipe.send("start")
        row = pair.measure(initiator.transfer, pid, options)
        pipe.send("sample")
        if pipe.recv_bytes() != pair.sample(initiator.arena, options):
            sys.exit("the arenas differ after the transfer")
    if options.operation == "read":
        row["cpu_sender_s_per_gb"], row["cpu_receiver_s_per_gb"] = (
            row["cpu_receiver_s_per_gb"], row["cpu_sender_s_per_gb"])
    pair.show({"peer": "nixl", "version": importlib.metadata.version("nixl-cu12"),
               "operation": options.operation} | row)
    # NIXL 1.5.1 crashes in its destructors, whatever is released before.
    os._exit(0)


if __name__ == "__main__":
    main()
