"""How `elasticmoe plan` shows its answer: a table for people, a drawing as SVG. Pure."""

from collections.abc import Sequence

from elasticmoe.runtime.simulator.advice import Advice, Expectation
from elasticmoe.runtime.simulator.system import System
from elasticmoe.runtime.simulator.usage import Usage

WIDTH, HEIGHT, LEFT, TOP = 640, 200, 60, 30
COLORS = ("#1f77b4", "#d62728")
MOST_POINTS = 400


def table(usage: Usage, system: System, advice: Advice) -> str:
    """Return the answer as text."""
    kv_gib, weights_gib = system.kv_bytes / 2**30, system.model.weight_bytes / 2**30
    full = f"KV {usage.kv_usage(0.5):.0%} full in the median, {usage.kv_usage(0.99):.0%} at the peak"
    waits = f"requests wait {usage.waiting_share:.0%} of the time, {usage.short_share:.0%} with KV full"
    lines = [
        f"{system.model.name} on {system.gpu.name}: weights {weights_gib:.1f} GiB and KV {kv_gib:.1f} GiB a GPU",
        f"{len(usage.samples)} readings over {usage.hours:.1f} h: {full}; {waits}",
        "",
        f"The pool would {'help' if advice.helps else 'not help'}: {advice.reason}.",
    ]
    if advice.limit is not None:
        lines.append(f"Start with --elastic-limit {advice.limit}.")
    if advice.stock is not None:
        best = () if advice.pool is None else (advice.pool,)
        lines += [
            "",
            f"Expected with {advice.num_requests} requests at once:",
            *_rows(advice.stock, best, advice.sweep),
        ]
    return "\n".join(lines)


def _rows(stock: Expectation, best: Sequence[Expectation], sweep: Sequence[Expectation]) -> list[str]:
    head = f"{'':16}{'tokens/s':>10}{'at once':>9}{'preempted':>11}{'P99 TTFT':>11}{'P99 TPOT':>11}"
    rows = [head]
    for one in (stock, *sweep):
        name = "stock vLLM" if one.limit is None else f"limit {one.limit}"
        mark = " <" if one in best else ""
        rows.append(
            f"{name:16}{one.tok_s:10.0f}{one.peak:9d}{one.preemptions:11d}{one.ttft_s:9.2f} s"
            f"{one.tpot_s * 1e3:8.1f} ms{mark}"
        )
    return rows


def draw(usage: Usage, advice: Advice) -> str:
    """Return an SVG: KV use and waiting requests over the day, and tokens/s by limit if it was simulated."""
    start_s = usage.samples[0].at_s
    every = max(1, len(usage.samples) // MOST_POINTS)
    day = [((one.at_s - start_s) / 3600, one) for one in usage.samples[::every]]
    charts = [
        chart("share of KV in use, by hour", [[(hour, one.kv_usage) for hour, one in day]]),
        chart("requests waiting, by hour", [[(hour, one.waiting) for hour, one in day]]),
    ]
    if advice.stock is not None:
        ours = [(float(one.limit or 0), one.tok_s) for one in advice.sweep]
        stock = [(limit, advice.stock.tok_s) for limit, _ in ours]
        charts.append(chart("tokens/s at the peak by limit (blue: pool, red: stock)", [ours, stock]))
    return stack(charts)


def stack(charts: Sequence[str]) -> str:
    """Return an SVG document of charts, one below the other."""
    body = "".join(f'<g transform="translate(0,{n * HEIGHT})">{one}</g>' for n, one in enumerate(charts))
    size = f'width="{WIDTH}" height="{HEIGHT * len(charts)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">{body}</svg>\n'


def chart(title: str, lines: Sequence[Sequence[tuple[float, float]]]) -> str:
    """Return one chart of lines as an SVG fragment, the y axis from 0."""
    xs = [x for line in lines for x, _ in line]
    most_y = max((y for line in lines for _, y in line), default=0.0) or 1.0
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    wide, tall = WIDTH - LEFT - 20, HEIGHT - TOP - 30

    def place(point: tuple[float, float]) -> str:
        x = LEFT + wide * (point[0] - low) / ((high - low) or 1.0)
        return f"{x:.1f},{TOP + tall * (1 - point[1] / most_y):.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{COLORS[n % len(COLORS)]}" points="{" ".join(map(place, line))}"/>'
        for n, line in enumerate(lines)
    )
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{tall}" fill="none" stroke="#999"/>'
    texts = [
        (LEFT, TOP - 8, "start", title),
        (LEFT - 4, TOP + 10, "end", f"{most_y:.4g}"),
        (LEFT - 4, TOP + tall, "end", "0"),
        (LEFT, TOP + tall + 16, "middle", f"{low:.4g}"),
        (LEFT + wide, TOP + tall + 16, "middle", f"{high:.4g}"),
    ]
    labels = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in texts)
    return frame + drawn + labels
