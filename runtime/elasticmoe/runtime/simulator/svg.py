"""Line charts as SVG, drawn by hand: what plans and the simulator's documents show needs no plotting library."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 640, 220, 60, 30
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f")

Points = Sequence[tuple[float, float]]


def chart(title: str, lines: Mapping[str, Points]) -> str:
    """Return one chart of named lines as an SVG fragment, the y axis from 0; names are shown if there are several."""
    xs = [x for points in lines.values() for x, _ in points]
    most_y = max((y for points in lines.values() for _, y in points), default=0.0) or 1.0
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    wide, tall = WIDTH - LEFT - 20, HEIGHT - TOP - 30

    def place(point: tuple[float, float]) -> str:
        x = LEFT + wide * (point[0] - low) / ((high - low) or 1.0)
        return f"{x:.1f},{TOP + tall * (1 - point[1] / most_y):.1f}"

    parts = [f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{tall}" fill="none" stroke="#999"/>']
    for n, (name, points) in enumerate(lines.items()):
        color = COLORS[n % len(COLORS)]
        parts.append(f'<polyline fill="none" stroke="{color}" points="{" ".join(map(place, points))}"/>')
        if len(lines) > 1:
            parts.append(_text(WIDTH - 24, TOP + 14 * (n + 1), "end", name, color))
    parts += [
        _text(LEFT, TOP - 8, "start", title),
        _text(LEFT - 4, TOP + 10, "end", f"{most_y:.4g}"),
        _text(LEFT - 4, TOP + tall, "end", "0"),
        _text(LEFT, TOP + tall + 16, "middle", f"{low:.4g}"),
        _text(LEFT + wide, TOP + tall + 16, "middle", f"{high:.4g}"),
    ]
    return "".join(parts)


def stack(charts: Sequence[str]) -> str:
    """Return an SVG document of charts, one below the other."""
    body = "\n".join(f'<g transform="translate(0,{n * HEIGHT})">{one}</g>' for n, one in enumerate(charts))
    size = f'width="{WIDTH}" height="{HEIGHT * len(charts)}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} style="background:#fff">\n{body}\n</svg>\n'


def thin(points: Points, most: int = 300) -> list[tuple[float, float]]:
    """Return about `most` of the points at most, evenly picked, the last one among them."""
    every = max(1, len(points) // most)
    return [*points[: len(points) - 1 : every], *points[-1:]]


def _text(x: float, y: float, anchor: str, text: str, color: str = "#000") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
