"""Bandwidth against the size of messages as SVG, one panel for TCP and one for UCX's own choice."""

import html
import math

from svg import COLOURS, line, text

WIDTH, HEIGHT, MARGIN, LEGEND = 460, 440, 48, 96

PANELS = {
    "over TCP": {
        "Baton: plain TCP": {"source": "baton", "way": "tcp", "level": "wire"},
        "Baton: gRPC": {"source": "baton", "way": "grpc", "level": "wire"},
        "Baton: gRPC, checksums": {"source": "baton", "way": "grpc", "level": "checked"},
        "Baton: UCX": {"source": "baton", "way": "ucx", "level": "wire", "transports": "tcp"},
        "NIXL write, progress thread": {"source": "nixl", "way": "write", "transports": "tcp",
                                        "polling": "waiting"},
        "NIXL write, busy polling": {"source": "nixl", "way": "write", "transports": "tcp",
                                     "polling": "busy"},
        "Mooncake write": {"source": "mooncake"},
        "iperf3": {"source": "iperf3"},
    },
    "within one host, UCX's default transports": {
        "Baton: UCX": {"source": "baton", "way": "ucx", "level": "wire", "transports": "default"},
        "Baton: UCX, placed": {"source": "baton", "way": "ucx", "level": "placed",
                               "transports": "default"},
        "NIXL write": {"source": "nixl", "way": "write", "transports": "default"},
        "NIXL read": {"source": "nixl", "way": "read", "transports": "default"},
        "ucx_perftest put": {"source": "ucx_perftest", "way": "put", "transports": "default"},
        "ucx_perftest am": {"source": "ucx_perftest", "way": "am", "transports": "default"},
    },
}


def fastest(rows, wanted):
    """The fastest of the rows that have all wanted fields, or none."""
    fitting = [row for row in rows if wanted.items() <= row.items()]
    return max(fitting, key=lambda row: row["gb_per_s"], default=None)


def draw(rows):
    """`rows` have the fields of `transfer_rows.Row` and `gb_per_s`; of several that a line names,
    the fastest at each size counts. Sizes are on a logarithmic axis; pages of KV are left out."""
    panels = [_panel(title, lines, [row for row in rows if not row["shape"]], index * WIDTH)
              for index, (title, lines) in enumerate(PANELS.items())]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH * len(panels)}" height="{HEIGHT}" fill="white"/>',
        *(part for panel in panels for part in panel), "</svg>", ""])


def _panel(title, lines, rows, left):
    points = {}
    for name, wanted in lines.items():
        found = [fastest(rows, wanted | {"message": size})
                 for size in sorted({row["message"] for row in rows})]
        points[name] = [(row["message"], row["gb_per_s"]) for row in found if row]
    yield text(left + MARGIN, 20, f"GB/s {title}, by bytes of a message")
    drawn = [point for line_ in points.values() for point in line_]
    if not drawn:
        return
    sizes = sorted({size for size, _ in drawn})
    step = _step(max(rate for _, rate in drawn))
    top = step * math.ceil(max(rate for _, rate in drawn) / step)
    span = math.log2(sizes[-1] / sizes[0]) or 1

    def at(size, rate):
        return (left + MARGIN + math.log2(size / sizes[0]) / span * (WIDTH - 2 * MARGIN),
                HEIGHT - LEGEND - MARGIN - rate / top * (HEIGHT - LEGEND - 2 * MARGIN))

    for rate in (step * index for index in range(round(top / step) + 1)):
        yield line(*at(sizes[0], rate), *at(sizes[-1], rate), "#ddd")
        x, y = at(sizes[0], rate)
        yield text(x - 8, y + 4, f"{rate:g}", "end")
    for size in sizes:
        x, y = at(size, 0)
        yield text(x, y + 18, _size(size), "middle")
    for index, (name, reached) in enumerate(points.items()):
        yield from _line_of(name, [at(*point) for point in reached], reached, COLOURS[index])
        yield text(left + MARGIN + index % 2 * (WIDTH / 2 - MARGIN / 2),
                   HEIGHT - LEGEND + 24 * (index // 2), name, colour=COLOURS[index])


def _line_of(name, places, points, colour):
    for start, end in zip(places, places[1:]):
        yield line(*start, *end, colour, 2)
    for (x, y), (size, rate) in zip(places, points):
        yield (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>'
               f'{html.escape(name)}, {_size(size)}: {rate:.2f} GB/s</title></circle>')


def _step(most):
    """A round step such that there are at most eight."""
    return next(step for step in (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100) if most / step <= 8)


def _size(bytes_):
    return f"{bytes_ >> 20} MiB" if bytes_ >= 1 << 20 else f"{bytes_ >> 10} KiB"
