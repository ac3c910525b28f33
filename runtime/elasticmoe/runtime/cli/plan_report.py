"""How `elasticmoe plan` shows its answer: a table for people, a drawing as SVG."""

import math
from collections.abc import Sequence

from elasticmoe.runtime.simulator.advice import Advice, Expectation
from elasticmoe.runtime.simulator.outcome import Slo
from elasticmoe.runtime.simulator.svg import chart, stack, thin
from elasticmoe.runtime.simulator.system import System
from elasticmoe.runtime.simulator.usage import Usage


def table(usage: Usage, system: System, advice: Advice, slo: Slo) -> str:
    """Return the answer as text; `slo` is what goodput was to keep."""
    tpot_ms = 1000 * slo.tpot_s
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
        promised = "" if math.isinf(slo.ttft_s) else f" --elastic-ttft-ms {1000 * slo.ttft_s:g}"
        lines.append(f"Start with --elastic-limit {advice.limit} --elastic-tpot-ms {tpot_ms:g}{promised}.")
    if advice.pool is not None and advice.stock is not None and advice.pool.tpot_s > tpot_ms / 1000:
        nearest = "stock vLLM does" if advice.stock.tpot_s <= tpot_ms / 1000 else "the one marked comes nearest"
        lines.append(f"None of these limits keeps {tpot_ms:g} ms a token for 99 of 100 requests; {nearest}.")
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
    hours = [((one.at_s - start_s) / 3600, one) for one in usage.samples]
    charts = [
        chart("share of KV in use, by hour", {"KV": thin([(hour, one.kv_usage) for hour, one in hours])}),
        chart("requests waiting, by hour", {"waiting": thin([(hour, one.waiting) for hour, one in hours])}),
    ]
    if advice.stock is not None:
        ours = [(float(one.limit or 0), one.tok_s) for one in advice.sweep]
        stock = [(limit, advice.stock.tok_s) for limit, _ in ours]
        charts.append(chart("tokens/s at the peak, by limit", {"pool": ours, "stock vLLM": stock}))
    return stack(charts)
