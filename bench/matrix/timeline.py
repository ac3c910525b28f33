"""What a layer's kernels wait for, out of profiles of a serving engine's steps.

    python -m bench.matrix.timeline bench/results/profile-h200.json [--page docs/performance.md]
    python -m bench.matrix.timeline PROFILE --meta RESULT --commit SHA --out bench/results/profile-h200.json

The second tells where a profile comes from: a result of the same machine has its meta data. A profile has by case:
`top`, [kernel, launches, µs] over its steps; `cpu`, [calls, µs] by call of CUDA; `span_us`, the steps' time together;
`raw`, [start µs, µs, kernel, stream] of the last step in order of start, with some of the one before. Of a layer it is
read when its fetch starts and ends, when the experts that are there are done (`_stamp` comes right after them), and
when those that were away begin.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.matrix.page import put, table
from bench.serving.arguments import count, new_file
from bench.serving.errors import BadScenario
from bench.serving.files import end_in_a_sentence, parse_object, read_part, read_text
from elasticmoe.runtime.cli.staging import write_whole

IDLE_US = 50.0
"""A fetch up to this long copied nothing: one expert takes 190."""
GEMMS = ("gate_up_kernel", "down_kernel")
HEAD = (
    "profile",
    "step, ms",
    "expert GEMMs",
    "fetches",
    "layers that fetch",
    "waited, ms",
    "hidden",
    "added µs a layer",
)
LAYERS = ("layer", "fetch, µs", "resident experts", "waited", "whole MoE")

Event = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's MoE, µs."""

    fetch_us: float
    resident_us: float
    """From the fetch's start until the experts that are there are done."""
    waited_us: float
    """From then until those that were away begin; none without a copy."""
    added_us: float
    """What else lies between the two parts and the sum: the stamp and both launches for what is late."""
    whole_us: float

    @property
    def is_fetching(self) -> bool:
        """Whether anything was copied."""
        return self.fetch_us > IDLE_US


def read_layers(raw: Sequence[Event]) -> list[Layer]:
    """Return the layers that are whole in the timeline."""
    starts = [n for n, event in enumerate(raw) if event[2] == "_fetch"]
    ends = [*starts[1:], len(raw)]
    return [layer for start, end in zip(starts, ends, strict=True) if (layer := _read(raw[start:end]))]


def _read(events: Sequence[Event]) -> Layer | None:
    fetch = events[0]
    stamps = [n for n, event in enumerate(events) if event[2] == "_stamp"]
    sums = [event for event in events if event[2] == "sum_kernel"]
    if not stamps or not sums:
        return None
    before, after, total = events[: stamps[0]], events[stamps[0] + 1 :], sums[0]
    done_us = max(_end(event) for event in before if event[2] == GEMMS[1])
    late_us = next(event[0] for event in after if event[2] == GEMMS[0])
    waited_us = max(late_us - _end(events[stamps[0]]), 0.0) if fetch[1] > IDLE_US else 0.0
    return Layer(
        fetch_us=fetch[1],
        resident_us=done_us - fetch[0],
        waited_us=waited_us,
        added_us=max(total[0] - done_us - waited_us, 0.0),
        whole_us=_end(total) - fetch[0],
    )


def _end(event: Event) -> float:
    return float(event[0] + event[1])


def case_row(name: str, profile: dict[str, Any], num_layers: int) -> list[str]:
    """Return a case's line under HEAD: ms a step over all steps; layers, waits and what is hidden of the last one."""
    steps, layers = profile["cpu"]["cudaGraphLaunch"][0], read_layers(profile["raw"])[-num_layers:]
    gemms_ms, fetch_ms = (
        sum(us for kernel, _, us in profile["top"] if kernel in names) / steps / 1000 for names in (GEMMS, ("_fetch",))
    )
    fetching = [layer for layer in layers if layer.is_fetching]
    waited_us, fetched_us = (sum(getattr(one, what) for one in fetching) for what in ("waited_us", "fetch_us"))
    idle = [layer.added_us for layer in layers if not layer.is_fetching]
    return [
        name,
        f"{profile['span_us'] / steps / 1000:.1f}",
        f"{gemms_ms:.1f}",
        f"{fetch_ms:.1f}",
        f"{len(fetching)} of {len(layers)}",
        f"{waited_us / 1000:.1f}",
        f"{100 * (1 - waited_us / fetched_us):.0f} %" if fetching else "",
        f"{median(idle):.1f}" if idle else "",
    ]


def layer_rows(layers: Sequence[Layer]) -> list[list[str]]:
    """Return lines under LAYERS: those without a fetch on average, then each with one, shortest fetch first."""
    idle = [layer for layer in layers if not layer.is_fetching]
    fields = ("fetch_us", "resident_us", "waited_us", "whole_us")
    rows = [["nothing away, mean", *(f"{mean(getattr(one, field) for one in idle):.0f}" for field in fields)]]
    fetching = sorted((layer for layer in layers if layer.is_fetching), key=lambda one: one.fetch_us)
    picked = {"shortest fetch": 0, "median": len(fetching) // 2, "longest": len(fetching) - 1} if fetching else {}
    return rows + [[name, *(f"{getattr(fetching[n], field):.0f}" for field in fields)] for name, n in picked.items()]


def report(profiles: dict[str, Any], num_layers: int) -> str:
    """Return both tables in Markdown; the second of the case that fetches most."""
    cases = table(HEAD, [case_row(name, profile, num_layers) for name, profile in profiles.items()])
    layers = {name: read_layers(profile["raw"])[-num_layers:] for name, profile in profiles.items()}
    most = max(layers, key=lambda name: sum(one.fetch_us for one in layers[name]))
    return f"{cases}\n\nLayers of the last step of `{most}`:\n\n{table(LAYERS, layer_rows(layers[most]))}"


def main() -> int:
    """Print the report or put it into the page, or write the profile with its meta data; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--page", type=Path, help="a page of Markdown whose part `timeline` is written anew")
    parser.add_argument("--layers", type=count, default=48, help="MoE layers of the model")
    parser.add_argument("--out", type=new_file, help="where the profile goes with its meta data")
    parser.add_argument("--meta", type=Path, help="a result of the machine that ran")
    parser.add_argument("--commit", help="of the tree that ran")
    args = parser.parse_args()
    if args.out and not (args.meta and args.commit):
        parser.error("--out wants --meta and --commit")
    profile = parse_object(read_text(args.profile), str(args.profile))
    cases = profile.get("cases", profile)
    try:
        text = report(cases, args.layers)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadScenario(f"{args.profile}: want a profile of layers that fetch for themselves ({error!r})") from error
    if args.out:
        meta = read_part(args.meta, "meta", dict) | {"commit": args.commit}
        write_whole(args.out, json.dumps({"meta": meta, "cases": cases}) + "\n")
    elif args.page:
        write_whole(args.page, put(read_text(args.page), "timeline", text))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
