"""A roofline plot as SVG: what each case achieves under the ceilings of memory and arithmetic."""

import html
import math

from svg import COLOURS, line, text

WIDTH, HEIGHT, MARGIN = 760, 480, 64


def draw(rows):
    """`rows` have `format`, `phase`, `size`, `context`, `flops_per_s`, `bytes_per_s`,
    `read_bytes_per_s`, `float_ops_per_s` and `dot_ops_per_s` (0: not measured). Axes are
    logarithmic: operations for each byte, and operations in a second."""
    read = max(row["read_bytes_per_s"] for row in rows)
    dots = max(row["dot_ops_per_s"] for row in rows) or max(row["flops_per_s"] for row in rows) * 2
    points = [(row["flops_per_s"] / row["bytes_per_s"], row["flops_per_s"], row) for row in rows]
    x_low, x_high = 10 ** math.floor(math.log10(min(x for x, _, _ in points) / 2)), 10 ** math.ceil(
        math.log10(max(max(x for x, _, _ in points), dots / read) * 2))
    y_low = 10 ** math.floor(math.log10(min(y for _, y, _ in points) / 2))
    y_high = 10 ** math.ceil(math.log10(dots * 1.2))

    def at(x, y):
        across = (math.log10(x) - math.log10(x_low)) / (math.log10(x_high) - math.log10(x_low))
        up = (math.log10(y) - math.log10(y_low)) / (math.log10(y_high) - math.log10(y_low))
        return (MARGIN + across * (WIDTH - 2 * MARGIN),
                HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN))

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
             'font-family="sans-serif" font-size="11">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for exponent in range(round(math.log10(x_low)), round(math.log10(x_high)) + 1):
        (x, bottom), (_, top) = at(10 ** exponent, y_low), at(10 ** exponent, y_high)
        parts.append(line(x, bottom, x, top, "#ddd"))
        parts.append(text(x, bottom + 16, f"{10.0 ** exponent:g}", "middle"))
    for exponent in range(round(math.log10(y_low)), round(math.log10(y_high)) + 1):
        (left, y), (right, _) = at(x_low, 10 ** exponent), at(x_high, 10 ** exponent)
        parts.append(line(left, y, right, y, "#ddd"))
        parts.append(text(left - 6, y + 4, f"{10.0 ** (exponent - 9):g} G", "end"))
    knee = dots / read
    parts.append(line(*at(max(x_low, y_low / read), max(y_low, x_low * read)), *at(knee, dots),
                      "#333", 2))
    parts.append(line(*at(knee, dots), *at(x_high, dots), "#333", 2))
    floats = max(row["float_ops_per_s"] for row in rows)
    parts.append(line(*at(floats / read, floats), *at(x_high, floats), "#999"))
    x, y = at(x_high, floats)
    parts.append(text(x, y - 6, f"{floats / 1e9:.0f} G f32 operations/s", "end", "#777"))
    x, y = at(knee, dots)
    parts.append(text(x + 8, y - 8, f"{dots / 1e9:.0f} G int8 operations/s, "
                      f"{read / 1e9:.1f} GB/s", "start"))
    formats = sorted({row["format"] for row in rows})
    for x, y, row in points:
        colour = COLOURS[formats.index(row["format"]) % len(COLOURS)]
        across, up = at(x, y)
        name = row["name"]
        parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" fill="{colour}">'
                     f'<title>{html.escape(row["format"] + " " + name)}</title></circle>')
        parts.append(text(across + 7, up + 4, name, "start", colour))
    for index, name in enumerate(formats):
        parts.append(text(MARGIN + 12, MARGIN + 16 * (index + 1), name, "start",
                          COLOURS[index % len(COLOURS)]))
    parts.append(text(WIDTH / 2, HEIGHT - 18, "operations for each byte of weights and KV",
                      "middle"))
    parts.append(text(MARGIN - 50, MARGIN - 20, "operations/s", "start"))
    return "\n".join([*parts, "</svg>", ""])
