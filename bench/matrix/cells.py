"""The cells of the serving matrix and how a command line names them. Pure."""

import re
from collections import Counter
from dataclasses import dataclass, replace

from bench.serving.errors import BadScenario

WORKLOADS = ("closed", "light", "open", "burst")
ROUTINGS = ("skewed", "flat")
CELL = ("workload", "routing", "kv_gib", "gpus", "bus_gb_s", "rate", "has_logprobs")
"""What tells the cells of rows and of kept tokens apart, in their order."""
ANY_BUS = {"bus_gb_s": None}
"""Stock fetches nothing, so what it gave without a throttled bus stands beside every bus."""
FORM = "workload:routing:kv_gib[@rate][+logprobs][xREPEATS]"
_SPEC = re.compile(
    r"(?P<workload>\w+):(?P<routing>\w+):(?P<kv>[0-9]*\.?[0-9]+)"
    r"(@(?P<rate>[0-9]*\.?[0-9]+))?(?P<logprobs>\+logprobs)?(x(?P<repeats>[1-9][0-9]{0,2}))?"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload under one routing in one room."""

    workload: str
    routing: str
    kv_gib: float
    rate: float | None = None
    """`open` only: how many times faster than in the trace requests come."""
    has_logprobs: bool = False
    """Whether each token's logprob is asked for, to compare them: it costs time."""
    repeat: int = 0


def parse_cells(spec: str) -> tuple[Cell, ...]:
    """Return the cells of a spec of FORMs separated by commas, each repeat as one.

    Raises BadScenario that names the first part which is none.
    """
    cells: list[Cell] = []
    repeats: Counter[Cell] = Counter()
    for part in filter(None, (part.strip() for part in spec.split(","))):
        match = _SPEC.fullmatch(part)
        if match is None or match["workload"] not in WORKLOADS or match["routing"] not in ROUTINGS:
            raise BadScenario(f"wanted {FORM} with {WORKLOADS} and {ROUTINGS}, it is {part!r}")
        if (match["workload"] == "open") != (match["rate"] is not None):
            raise BadScenario(f"wanted @rate for open and for nothing else, it is {part!r}")
        rate = float(match["rate"]) if match["rate"] else None
        if float(match["kv"]) == 0 or rate == 0:
            raise BadScenario(f"wanted GiB and a rate above 0, it is {part!r}")
        one = Cell(match["workload"], match["routing"], float(match["kv"]), rate, match["logprobs"] is not None)
        for _ in range(int(match["repeats"] or 1)):
            cells.append(replace(one, repeat=repeats[one]))
            repeats[one] += 1
    if not cells:
        raise BadScenario(f"wanted {FORM} at least once, there is no cell in {spec!r}")
    return tuple(cells)
