#!/usr/bin/env python3
"""Baton's transfer of KV against its peers on one machine, interleaved; prints the ratios.

Each round measures all rows once, those next to each other that are compared; a ratio is taken
within a round and the median over rounds counts. What cannot be measured is named with the reason,
and the rest goes on. `make bench-transfer` installs the peers: NIXL, Mooncake, UCX, iperf3.

Writes the figures as transfer.json and a plot as transfer.svg into --out. GB are 10^9 bytes; CPU
time is of all threads, user and system.

Example: benches/transfer.py --rounds 3
Example: benches/transfer.py --quick --only 'grpc wire'
"""

import argparse
import dataclasses
import json
import pathlib
import signal
import statistics
import sys

import transfer_plot
import transfer_rows
import transfer_sources
from transfer_processes import Failed

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATON = ROOT / "target" / "release" / "baton"
DOCS = ROOT / "docs" / "benchmarks"
TOTAL_BYTES, QUICK_BYTES = 4 << 30, 512 << 20
SHOWN_LINES = 20

# Every row is shown by this one at the same size of messages; pages of KV by that of 1 MiB.
PLAIN = {"source": "baton", "way": "tcp", "level": "wire", "in_flight": 1}
METRICS = {
    "gb_per_s": lambda run: run["gb_per_s"],
    "cpu_s_per_gb": lambda run: run["cpu_sender_s_per_gb"] + run["cpu_receiver_s_per_gb"],
}


def measure(rows, sources, options):
    """Runs all rows, interleaved. Returns figures by row and round, and reasons by row without."""
    runs, failures = {row: {} for row in rows}, {}
    for row in rows:
        reason = sources[row.source].missing(row)
        if reason:
            failures[row] = reason
    for source in sorted({f"{row.source}: {reason}" for row, reason in failures.items()}):
        print(f"not measured: {source}", file=sys.stderr)
    for at in range(options.rounds):
        for index, row in enumerate(rows):
            if row in failures:
                continue
            print(f"round {at + 1} of {options.rounds}, {index + 1} of {len(rows)}: {row}",
                  file=sys.stderr)
            try:
                runs[row][at] = sources[row.source].measure(row, options.total)
            except Failed as failure:
                failures[row] = str(failure)
                tell(row, failure)
    return runs, failures


def tell(row, failure):
    print(f"{row} is left out from here: {failure}", file=sys.stderr)
    for said in failure.said.strip().splitlines()[-SHOWN_LINES:]:
        print(f"  {said}", file=sys.stderr)


def report_of(row, runs):
    """Medians over the rounds of one row."""
    middle = lambda value: statistics.median(value(run) for run in runs.values())
    last = next(reversed(runs.values()))
    figures = {name: middle(value) for name, value in METRICS.items()}
    for side in ("cpu_sender_s_per_gb", "cpu_receiver_s_per_gb"):
        figures[side] = middle(lambda run, side=side: run[side])
    return {"name": str(row)} | dataclasses.asdict(row) | figures | {
        "version": last["version"], "operation": last["operation"], "runs": runs}


def ratios_of(ours, theirs, metric):
    """One ratio for each round that measured both."""
    value = METRICS[metric]
    return [value(ours["runs"][at]) / value(theirs["runs"][at]) for at in ours["runs"]
            if at in theirs["runs"] and value(theirs["runs"][at]) > 0]


def add_ratios_to_plain(rows):
    for row in rows:
        message = transfer_rows.MIB if row["shape"] else row["message"]
        plain = transfer_plot.fastest(rows, PLAIN | {"message": message})
        ratios = ratios_of(row, plain, "gb_per_s") if plain else []
        row["by_plain_tcp"] = statistics.median(ratios) if ratios else None


def compare(comparison, rows):
    """What a comparison came to; without a ratio where one side was not measured."""
    ours = transfer_plot.fastest(rows, comparison.ours)
    theirs = transfer_plot.fastest(rows, comparison.theirs)
    ratios = ratios_of(ours, theirs, comparison.metric) if ours and theirs else []
    ratio = statistics.median(ratios) if ratios else None
    return {
        "name": comparison.name, "metric": comparison.metric, "floor": comparison.floor,
        "ceiling": comparison.ceiling, "ours": ours and ours["name"],
        "operation": ours and ours["operation"], "theirs": theirs and theirs["name"],
        "ratio": ratio, "ratios": ratios,
        "reached": comparison.is_reached(ratio) if ratios else None,
    }


def show_rows(rows):
    print(f"{'row':<58} {'GB/s':>6} {'min–max':>11} {'sender':>7} {'receiver':>8} {'by TCP':>6}  "
          "version")
    for row in rows:
        rates = [run["gb_per_s"] for run in row["runs"].values()]
        spread = f"{min(rates):.2f}–{max(rates):.2f}"
        plain = "" if row["by_plain_tcp"] is None else f"{row['by_plain_tcp']:.2f}"
        version = " ".join(filter(None, (row["version"], row["operation"])))
        print(f"{row['name']:<58} {row['gb_per_s']:>6.2f} {spread:>11} "
              f"{row['cpu_sender_s_per_gb']:>7.3f} {row['cpu_receiver_s_per_gb']:>8.3f} "
              f"{plain:>6}  {version}".rstrip())
    print("sender, receiver: CPU seconds for each GB; by TCP: ratio to Baton's plain TCP with one "
          "stream and the same messages, or of 1 MiB for pages of KV")


def show_comparisons(comparisons):
    if not comparisons:
        return
    print(f"\n{'comparison at 1 MiB, or of pages':<50} {'ratio':>6} {'min–max':>11} {'asked':>7}")
    for made in comparisons:
        asked = ("" if made["floor"] is None else f">={made['floor']:g}") + (
            "" if made["ceiling"] is None else f"<={made['ceiling']:g}")
        if made["ratio"] is None:
            print(f"{made['name']:<50} {'':>6} {'':>11} {asked:>7}  not measured")
            continue
        spread = f"{min(made['ratios']):.2f}–{max(made['ratios']):.2f}"
        missed = "below its floor" if made["ceiling"] is None else "above its ceiling"
        mark = (("reached" if made["reached"] else missed) if asked else "").ljust(17)
        print(f"{made['name']:<50} {made['ratio']:>6.2f} {spread:>11} {asked:>7}  {mark} "
              f"{made['ours']} {made['operation'] or ''} / {made['theirs']}")


def show_failures(failures):
    """By reason: a peer that is missing takes many rows with it."""
    names = {}
    for failure in failures:
        names.setdefault(failure["reason"], []).append(failure["name"])
    if failures:
        print("\nnot measured, or not in every round")
    for reason, of_rows in names.items():
        more = f" and {len(of_rows) - 1} more" if len(of_rows) > 1 else ""
        print(f"{of_rows[0]}{more}: {reason}")


def without_paths(reason, binary):
    """Reports are checked in; where this machine keeps its files is nobody's business."""
    for folder in (binary.parent, ROOT, pathlib.Path(sys.prefix), pathlib.Path(sys.base_prefix)):
        reason = reason.replace(f"{folder}/", "")
    return reason


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=None, help="3, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="one round, an eighth of the bytes")
    parser.add_argument("--only", metavar="SUBSTR", help="only rows whose names contain this")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    parser.add_argument("--baton", type=pathlib.Path, default=BATON, help="the binary")
    parser.add_argument("--out", type=pathlib.Path,
                        help="folder of transfer.json and transfer.svg; docs/benchmarks unless "
                             "--quick or --only is named")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 1 if options.quick else 3
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    options.total = QUICK_BYTES if options.quick else TOTAL_BYTES
    options.baton = options.baton.resolve()
    if options.out is None and not options.quick and not options.only:
        options.out = DOCS
    return options


def main():
    options = arguments()
    rows = [row for row in transfer_rows.all_rows() if (options.only or "") in str(row)]
    if not rows:
        sys.exit(f"no row's name contains {options.only!r}")
    if options.list:
        print("\n".join(map(str, rows)))
        return
    # As on Ctrl-C: children are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs, failures = measure(rows, transfer_sources.sources(options.baton), options)
    measured = [report_of(row, runs[row]) for row in rows if runs[row]]
    add_ratios_to_plain(measured)
    report = {
        "rounds": options.rounds, "bytes": options.total, "rows": measured,
        "comparisons": [compare(one, measured) for one in transfer_rows.comparisons()],
        "failures": [{"name": str(row), "reason": without_paths(reason, options.baton)}
                     for row, reason in failures.items()],
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "transfer.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "transfer.svg").write_text(transfer_plot.draw(measured))
    if options.json:
        print(json.dumps(report))
        return
    show_rows(measured)
    show_comparisons([made for made in report["comparisons"] if made["ratios"] or not options.only])
    show_failures(report["failures"])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
