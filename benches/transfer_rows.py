"""What `benches/transfer.py` measures, and which rows are held against which.

A row says who moves bytes and how. In flight are streams of Baton and of iperf3, requests of NIXL
and Mooncake (each of `batch` messages), and messages of ucx_perftest.
"""

import dataclasses

KIB, MIB = 1 << 10, 1 << 20
MESSAGES = (64 * KIB, MIB, 8 * MIB, 64 * MIB)
# Messages that peers take in one request, by their size.
BATCHES = {64 * KIB: 64, MIB: 16, 8 * MIB: 8, 64 * MIB: 4}
# Larger messages fill a link one at a time.
IN_FLIGHT = {64 * KIB: (1, 4), MIB: (1, 4), 8 * MIB: (1,), 64 * MIB: (1,)}
IPERF3_MOST_BYTES = MIB

LIBRARIES = ("libucx0", "libucx-cu12")
TRANSPORTS = ("default", "tcp")
# Busy: both sides poll without pause. Waiting: ours sleeps until the socket or UCX has something,
# NIXL runs its progress thread, and its initiator asks every 100 us.
POLLING = ("busy", "waiting")


@dataclasses.dataclass(frozen=True)
class Shape:
    """KV as pages: one page for each layer of a block."""
    layers: int
    page_bytes: int
    blocks: int

    @property
    def batch(self):
        return self.layers * self.blocks


# Blocks such that NIXL gets requests of 12 and 21 MB.
SHAPES = {"smollm2": Shape(layers=30, page_bytes=12 * KIB, blocks=32),
          "llama70b": Shape(layers=80, page_bytes=64 * KIB, blocks=4)}


@dataclasses.dataclass(frozen=True)
class Row:
    source: str
    way: str
    message: int
    in_flight: int = 1
    batch: int = 1
    level: str = ""
    library: str = ""
    transports: str = ""
    polling: str = ""
    shape: str = ""

    def __str__(self):
        size = self.shape or (f"{self.message // MIB} MiB" if self.message >= MIB
                              else f"{self.message // KIB} KiB")
        count = f"x{self.in_flight}" + (f" of {self.batch}" if self.batch > 1 else "")
        words = [self.source, self.way, self.level, self.library, self.transports, self.polling]
        return " ".join([*filter(None, words), size, count])


def all_rows():
    """Rows that are held against each other stand near each other."""
    for message in MESSAGES:
        for in_flight in IN_FLIGHT[message]:
            yield from over_sockets(message, in_flight)
            yield from over_ucx(message, in_flight)
        yield from by_ucx_perftest(message)
    for name in SHAPES:
        yield from of_pages(name)


def over_sockets(message, in_flight):
    for level in ("wire", "checked"):
        for way in ("tcp", "grpc"):
            yield Row("baton", way, message, in_flight, level=level)
    yield Row("mooncake", "write", message, in_flight, BATCHES[message], transports="tcp")
    if message <= IPERF3_MOST_BYTES:
        yield Row("iperf3", "tcp", message, in_flight)


def over_ucx(message, in_flight):
    for transports in TRANSPORTS:
        for polling in POLLING:
            how = {"transports": transports, "polling": polling}
            for library in LIBRARIES:
                yield Row("baton", "ucx", message, in_flight, level="wire", library=library, **how)
            yield Row("nixl", "write", message, in_flight, BATCHES[message], **how)
            for library in LIBRARIES:
                yield Row("baton", "ucx-get", message, in_flight, level="wire", library=library,
                          **how)
            yield Row("nixl", "read", message, in_flight, BATCHES[message], **how)
        for library in LIBRARIES:
            yield Row("baton", "ucx", message, in_flight, level="placed", library=library,
                      transports=transports, polling="waiting")


def by_ucx_perftest(message):
    for transports in TRANSPORTS:
        for way in ("put", "am"):
            yield Row("ucx_perftest", way, message, BATCHES[message], library="libucx0",
                      transports=transports, polling="busy")


def of_pages(name):
    shape = SHAPES[name]
    yield Row("baton", "grpc", MIB, level="handoff", shape=name)
    for transports in TRANSPORTS:
        for polling in POLLING:
            how = {"transports": transports, "polling": polling, "shape": name}
            for library in LIBRARIES:
                yield Row("baton", "ucx", MIB, level="handoff", library=library, **how)
            yield Row("nixl", "write", shape.page_bytes, batch=shape.batch, **how)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The fastest of our rows that match, by the fastest of the other ones that match."""
    name: str
    ours: dict
    theirs: dict
    metric: str = "gb_per_s"
    floor: float | None = None
    ceiling: float | None = None

    def is_reached(self, ratio):
        return ((self.floor is None or ratio >= self.floor)
                and (self.ceiling is None or ratio <= self.ceiling))


def baton(way, level="wire", **more):
    return {"source": "baton", "way": way, "level": level, "message": MIB, "shape": ""} | more


def nixl(way, transports, polling):
    return {"source": "nixl", "way": way, "message": MIB, "shape": "", "transports": transports,
            "polling": polling}


def comparisons():
    """All at messages of 1 MiB, the size of our frames, but for the pages of KV."""
    for level in ("wire", "checked"):
        grpc, tcp = baton("grpc", level), baton("tcp", level)
        yield Comparison(f"gRPC, plain TCP: {level}", grpc, tcp, floor=0.95)
        yield Comparison(f"gRPC, plain TCP: {level}, CPU", grpc, tcp, "cpu_s_per_gb", ceiling=1.25)
    yield Comparison("gRPC, Mooncake", baton("grpc"), {"source": "mooncake", "message": MIB},
                     floor=1.6)
    yield Comparison("gRPC, NIXL write tcp waiting", baton("grpc"),
                     nixl("write", "tcp", "waiting"), floor=1.3)
    yield from same_mode()
    for shape in SHAPES:
        for transports in TRANSPORTS:
            for polling in POLLING:
                how = {"shape": shape, "transports": transports, "polling": polling}
                yield Comparison(f"UCX handoff, NIXL write {transports} {polling}: {shape}",
                                 baton("ucx", "handoff") | how, {"source": "nixl"} | how)


def same_mode():
    """UCX against NIXL, over the same transports and polling alike."""
    floors = {("default", "busy"): 0.95, ("tcp", "busy"): 0.9, ("tcp", "waiting"): 0.9}
    for transports in TRANSPORTS:
        for polling in POLLING:
            ours = baton("ucx", transports=transports, polling=polling)
            theirs = nixl("write", transports, polling)
            name = f"UCX, NIXL write: {transports} {polling}"
            yield Comparison(name, ours, theirs, floor=floors.get((transports, polling)))
            yield Comparison(f"{name}, CPU", ours, theirs, "cpu_s_per_gb", ceiling=1)
            yield Comparison(f"UCX get, NIXL read: {transports} {polling}",
                             baton("ucx-get", transports=transports, polling=polling),
                             nixl("read", transports, polling),
                             floor=0.95 if transports == "default" else None)
