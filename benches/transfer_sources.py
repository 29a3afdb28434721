"""Who can be measured and by which command; each source turns one row into one set of figures."""

import ctypes.util
import functools
import json
import pathlib
import shutil
import sys
import sysconfig

import transfer_processes as processes
from transfer_processes import Failed

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT_S = 180
SPIN_US = {"busy": 1_000_000, "waiting": 0}
NIXL_POLL_US = 100
PERFTEST_WARM_UP, PERFTEST_LEAST_MESSAGES = 4, 20
FIGURES = ("bytes", "seconds", "gb_per_s", "cpu_sender_s_per_gb", "cpu_receiver_s_per_gb")


class Baton:
    def __init__(self, binary):
        self.binary = binary

    def missing(self, row):
        if not self.binary.exists():
            return f"{self.binary.name} is not built"
        if row.library == "libucx0" and not ctypes.util.find_library("ucp"):
            return "libucx0 is not installed"
        if row.library == "libucx-cu12" and not packaged_ucx().exists():
            return "libucx-cu12 is not installed in this environment"
        return None

    def measure(self, row, total):
        command = [self.binary, "bench", "transfer", "--way", row.way, "--level", row.level,
                   "--message", row.message, "--streams", row.in_flight, "--total", total]
        if row.shape:
            command += ["--shape", row.shape]
        if row.library == "libucx-cu12":
            command += ["--ucx-library", packaged_ucx()]
        if row.transports not in ("", "default"):
            command += ["--ucx-tls", row.transports]
        if row.polling:
            command += ["--ucx-spin-us", SPIN_US[row.polling]]
        report = last_json(processes.run([*command, "--json"], TIMEOUT_S))
        ucx = report.get("ucx") or {}
        return figures(report) | {"version": ucx.get("version"), "operation": ucx.get("operation")}


class Nixl:
    def missing(self, _row):
        return import_error("nixl_cu12._api")

    def measure(self, row, total):
        command = [sys.executable, HERE / "transfer_nixl.py", "--operation", row.way,
                   *load(row, total)]
        if row.polling == "waiting":
            command += ["--progress-thread", "--poll-us", NIXL_POLL_US]
        if row.shape:
            command.append("--scatter")
        report = last_json(processes.run(command, TIMEOUT_S, ucx_tls(row)))
        return figures(report) | {"version": report["version"], "operation": report["operation"]}


class Mooncake:
    def missing(self, _row):
        return import_error("mooncake.engine")

    def measure(self, row, total):
        command = [sys.executable, HERE / "transfer_mooncake.py", *load(row, total)]
        report = last_json(processes.run(command, TIMEOUT_S))
        return figures(report) | {"version": report["version"], "operation": report["operation"]}


class Iperf3:
    def missing(self, _row):
        return None if shutil.which("iperf3") else "iperf3 is not installed"

    def measure(self, row, total):
        port = processes.free_port()
        with processes.Child(["iperf3", "-s", "-1", "-p", port]) as server:
            server.wait_for_port(port)
            out = processes.run(["iperf3", "-c", "127.0.0.1", "-p", port, "-n", total, "-l",
                                 row.message, "-P", row.in_flight, "-J"], TIMEOUT_S)
        report = json.loads(out)
        received, cpu = report["end"]["sum_received"], report["end"]["cpu_utilization_percent"]
        gigabytes = received["bytes"] / 1e9
        per_gb = received["seconds"] / gigabytes / 100
        return {
            "bytes": received["bytes"], "seconds": received["seconds"],
            "gb_per_s": gigabytes / received["seconds"],
            "cpu_sender_s_per_gb": cpu["host_total"] * per_gb,
            "cpu_receiver_s_per_gb": cpu["remote_total"] * per_gb,
            "version": report["start"]["version"].removeprefix("iperf "), "operation": None,
        }


class UcxPerftest:
    """Its two sides use one buffer each, again and again: up to 8 MiB it stays in caches. The CPU
    time includes what they need to start."""

    def missing(self, _row):
        return None if shutil.which("ucx_perftest") else "ucx_perftest is not installed"

    def measure(self, row, total):
        port, count = processes.free_port(), max(total // row.message, PERFTEST_LEAST_MESSAGES)
        ucx = ucx_tls(row) | {"UCX_LOG_LEVEL": "error"}
        with processes.Child(["ucx_perftest", "-p", port], ucx) as server:
            server.wait_for_port(port)
            before = processes.children_cpu_s()
            out = processes.run(["ucx_perftest", "127.0.0.1", "-p", port, "-t", f"ucp_{row.way}_bw",
                                 "-s", row.message, "-n", count, "-w", PERFTEST_WARM_UP,
                                 "-O", row.in_flight, "-f"], TIMEOUT_S, ucx)
            between = processes.children_cpu_s()
            server.finish(TIMEOUT_S)
        gigabytes = count * row.message / 1e9
        all_gigabytes = gigabytes + PERFTEST_WARM_UP * row.message / 1e9
        rate = overall_mib_per_s(out) * (1 << 20) / 1e9
        return {
            "bytes": count * row.message, "seconds": gigabytes / rate, "gb_per_s": rate,
            "cpu_sender_s_per_gb": (between - before) / all_gigabytes,
            "cpu_receiver_s_per_gb": (processes.children_cpu_s() - between) / all_gigabytes,
            "version": system_ucx_version(), "operation": row.way,
        }


def sources(binary):
    return {"baton": Baton(binary), "nixl": Nixl(), "mooncake": Mooncake(), "iperf3": Iperf3(),
            "ucx_perftest": UcxPerftest()}


def load(row, total):
    return ["--message", row.message, "--batch", row.batch, "--in-flight", row.in_flight,
            "--total", total]


def ucx_tls(row):
    return {} if row.transports == "default" else {"UCX_TLS": row.transports}


def packaged_ucx():
    """The library of the package libucx-cu12 in this interpreter's environment."""
    return pathlib.Path(sysconfig.get_path("purelib"), "libucx", "lib", "libucp.so.0")


@functools.cache
def import_error(module):
    """Why a module cannot be imported, or none."""
    try:
        processes.run([sys.executable, "-c", f"import {module}"], TIMEOUT_S)
    except Failed as failure:
        return failure.said.strip().rpartition("\n")[2] or str(failure)
    return None


@functools.cache
def system_ucx_version():
    words = processes.run(["ucx_info", "-v"], TIMEOUT_S).split()
    return words[words.index("Version") + 1] if "Version" in words else None


def last_json(out):
    """The report, after whatever a library printed."""
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise Failed("no line of JSON came", out)


def figures(report):
    return {name: report[name] for name in FIGURES}


def overall_mib_per_s(out):
    """Of `iterations | overheads | bandwidth average, overall | message rate average, overall`."""
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    if not rows or len(rows[-1]) < 3:
        raise Failed("ucx_perftest printed no figures", out)
    return float(rows[-1][-3])
