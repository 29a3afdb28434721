"""Two processes with an arena each: what the rows measured from Python share.

The initiator starts the target, moves bytes between the arenas and prints the row as one JSON line.
The target owns the other arena and does whatever the peer's library asks of that side. Arenas are
larger than caches, and every run visits all of an arena, so that no row profits from a small
buffer used again and again.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import time

import numpy

ARENA_BYTES = 512 << 20
# One byte of so many is compared after the run; coprime with the sizes of messages.
SAMPLE_EVERY = 4099


def parser(doc):
    """The flags that all such rows have."""
    made = argparse.ArgumentParser(description=doc,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--message", type=int, default=1 << 20, metavar="BYTES")
    made.add_argument("--batch", type=int, default=16, metavar="N", help="messages in one request")
    made.add_argument("--in-flight", type=int, default=1, metavar="N", help="requests at once")
    made.add_argument("--total", type=int, default=1 << 30, metavar="BYTES",
                      help="rounded up to whole requests")
    made.add_argument("--scatter", action="store_true",
                      help="take the messages' places in an order drawn by chance, as pages lie")
    return made


def requests(options):
    """The arena's messages as requests: a list of indices for each, all equally long."""
    count = ARENA_BYTES // options.message
    size = max(1, min(options.batch, count // options.in_flight))
    order = list(range(count))
    if options.scatter:
        random.Random(1).shuffle(order)
    return [order[at:at + size] for at in range(0, count - size + 1, size)]


def arena(filled):
    """All pages present: a pattern that differs from place to place, or zeros."""
    made = numpy.empty(ARENA_BYTES, dtype=numpy.uint8)
    if filled:
        made.view(numpy.uint32)[:] = numpy.arange(ARENA_BYTES // 4, dtype=numpy.uint32)
        made.view(numpy.uint32)[:] *= numpy.uint32(2654435761)
    else:
        made[:] = 0
    return made


def sample(memory, options):
    """Bytes of every message that a run has moved."""
    used = numpy.zeros(ARENA_BYTES // options.message, dtype=bool)
    used[[index for request in requests(options) for index in request]] = True
    places = numpy.arange(0, len(used) * options.message, SAMPLE_EVERY)
    return memory[places[used[places // options.message]]].tobytes()


def cpu_seconds(pid):
    """User and system time of all threads of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def target(work, *arguments):
    """Runs `work(pipe, *arguments)` in another process; gives the pipe and the process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process.pid
    finally:
        process.kill()
        process.join()


def measure(transfer, pid, options):
    """Times `transfer(number of requests)` after a warm-up that visits the whole arena."""
    several = requests(options)
    request_bytes = len(several[0]) * options.message
    count = -(-options.total // request_bytes)
    transfer(len(several))
    initiator, target_ = cpu_seconds(os.getpid()), cpu_seconds(pid)
    start = time.perf_counter()
    transfer(count)
    seconds = time.perf_counter() - start
    gigabytes = count * request_bytes / 1e9
    return {
        "message": options.message, "batch": len(several[0]), "in_flight": options.in_flight,
        "bytes": count * request_bytes, "seconds": seconds, "gb_per_s": gigabytes / seconds,
        "cpu_sender_s_per_gb": (cpu_seconds(os.getpid()) - initiator) / gigabytes,
        "cpu_receiver_s_per_gb": (cpu_seconds(pid) - target_) / gigabytes,
    }


def show(row):
    print(json.dumps(row), flush=True)
