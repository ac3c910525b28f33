"""Runs the cells of one system in this process, and appends each to its file as soon as it has ended."""

import fcntl
import json
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.matrix.cells import CELL, Cell, parse_cells
from bench.matrix.combine import read_lines, tokens_path
from bench.matrix.drive import Client, Recorder, serve
from bench.matrix.measure import company, figures
from bench.matrix.plans import Noted, PlanLog
from bench.matrix.room import Room
from bench.matrix.systems import GIB, SYSTEMS, Model, freed_bytes, read_model, start_engine
from bench.matrix.workloads import Arrival, Sizes, make_prompts, plan_arrivals
from bench.serving import needs
from bench.serving.errors import BadScenario
from bench.serving.progress import say

WARM_REQUESTS, WARM_OUT = 64, 16
CHURN_IN, CHURN_OUT = 160, 48
CHURN_REQUESTS = 12
"""Of a system whose experts don't leave: enough for the room to be too small, twice what it takes."""
TURN_S = 0.2
"""After a turn, so that whoever waits has the next."""
LEARN_REQUESTS, LEARN_IN, LEARN_OUT = 64, 100, 48
"""Before each cell of ours: enough of its routing for an online ranking to forget the last one's."""


class Bench:
    """One system, started and warm."""

    def __init__(self, args: Namespace) -> None:
        """Start the engine and warm it up."""
        self.args = args
        self.began_s = time.perf_counter()
        self.model: Model = read_model(Path(args.model), args.tp)
        self.sizes = _sizes(args)
        self.system = SYSTEMS[args.system]
        self.plans = PlanLog()
        self.followed = _read_plans(args.follow)
        self.llm, self.ready_s = start_engine(args, self.model)
        self.gpu_bytes = self.llm.collective_rpc("device_bytes")
        self.pin_s, self.pin_waited_s = zip(*self.llm.collective_rpc("pinning_s"), strict=True)
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.room = Room(self.core.scheduler)
        self.freed = freed_bytes(args.system, self.model)
        say(f"{args.system} is ready after {self.ready_s:.1f} s; {self.room.most_blocks} blocks of KV at most")
        self._warm_up()

    def run(self, cells: tuple[Cell, ...]) -> None:
        """Run the cells in order; none is started after the deadline."""
        for cell in cells:
            with turn(self.args.turns):
                if time.perf_counter() - self.began_s > self.args.deadline_s:
                    say(f"past the deadline of {self.args.deadline_s} s: {cell} and what follows are left out")
                    return
                row, kept = self.run_cell(cell)
            _append(self.args.out, row)
            _append(tokens_path(self.args.out), kept)
            say(f"{cell}: {row['tok_s']:.1f} tokens/s, {row['steps']} steps, peak {row['peak']}")

    def run_cell(self, cell: Cell) -> tuple[dict[str, Any], dict[str, Any]]:
        """Serve one cell; return its row, and its tokens, batches and plans."""
        before = self.prepare(cell)
        arrivals = plan_arrivals(cell, self.sizes)
        self.plans.start(self.followed.get(_key(self._cell(cell), cell.repeat)))
        recorder, wall_s = self.serve(arrivals, has_logprobs=cell.has_logprobs)
        plans, resident_end = self.plans.stop(), self.room.num_resident
        after = self._counts()
        self.room.settle(self.core)
        waited = self._waited()
        row = dict(zip(CELL, self._cell(cell), strict=True))
        row |= {"repeat": cell.repeat, "system": self.args.system} | figures(recorder, wall_s)
        row |= {name: after[name] - before["counts"][name] for name in after}
        row |= {name: waited[name] - before["waited"][name] for name in waited}
        row |= {"resident_end": resident_end, "was_settled": before["was_settled"], "kv_blocks": before["kv_blocks"]}
        row |= {"ready_s": self.ready_s, "gpu_bytes": self.gpu_bytes, "policy": self._policy, "limit": self.args.limit}
        row |= {"freed_bytes": self.freed, "pin_s": self.pin_s, "pin_waited_s": self.pin_waited_s}
        if cell.workload == "burst":
            row["series"] = recorder.series
        tokens = {str(number): one.tokens for number, one in recorder.served.items()}
        chains = {str(number): chain for number, chain in company(recorder.steps).items()}
        kept: dict[str, Any] = {"system": self.args.system, "cell": self._cell(cell), "repeat": cell.repeat}
        if cell.has_logprobs:
            kept["choices"] = {str(number): one.choices for number, one in recorder.served.items()}
        return row, kept | {"tokens": tokens, "company": chains, "plans": plans}

    def prepare(self, cell: Cell) -> dict[str, Any]:
        """Bring the engine to the cell's start."""
        self.room.give_back()
        was_settled = self.room.settle(self.core)
        self._set_routing(cell.routing)
        if self.system.is_elastic:
            self.serve((Arrival(0.0, LEARN_IN, LEARN_OUT),) * min(LEARN_REQUESTS, self.args.requests))
        was_settled = self.room.settle(self.core) and was_settled
        kv_blocks = self.room.leave(int(cell.kv_gib * GIB) + self.freed)
        return {
            "was_settled": was_settled or self._policy == "fixed",
            "kv_blocks": kv_blocks,
            "counts": self._counts(),
            "waited": self._waited(),
        }

    def serve(self, arrivals: tuple[Arrival, ...], *, has_logprobs: bool = False) -> tuple[Recorder, float]:
        """Serve requests as they arrive; return what was seen, and the seconds until the last token."""
        recorder = Recorder(self.core.scheduler)
        client = Client(self.llm, recorder, lambda: self.room.num_resident, has_logprobs)
        prompts = make_prompts(arrivals, self.model.vocab, self.sizes.seed)
        return recorder, serve(client, arrivals, prompts)

    # Inside

    def _warm_up(self) -> None:
        """Have every kernel compiled: short requests, a long prompt, and a batch in a room that is too small for it."""
        self._set_routing("skewed")
        half = self.args.max_model_len // 2
        num_in = min(CHURN_IN, half - CHURN_OUT)
        num = min(WARM_REQUESTS, self.args.requests)
        self.serve((Arrival(0.0, num_in, WARM_OUT),) * num)
        self.serve((Arrival(0.0, half, 2),))
        block_tokens = 16
        need = -(-(num_in + CHURN_OUT) // block_tokens) * 6 + 1
        self.room.leave(min(need, self.room.most_blocks) * self.room.block_bytes)
        num_churn = num if self.system.is_elastic else min(num, CHURN_REQUESTS)
        self.serve((Arrival(0.0, num_in, CHURN_OUT),) * num_churn)
        self.room.give_back()
        self.room.settle(self.core)
        say(f"warm; {self._counts().get('evictions', 0)} experts were evicted meanwhile")

    def _set_routing(self, routing: str) -> None:
        self.llm.collective_rpc("set_skewed", args=(routing == "skewed",))

    def _counts(self) -> dict[str, int]:
        if self.room.adjuster is None:
            return {}
        counts = self.room.adjuster.counts
        return {"evictions": counts.evicted, "loads": counts.loaded, "swaps": counts.swapped}

    def _waited(self) -> dict[str, float]:
        """Return the experts that were missed, and the seconds that compute waited for them, since start."""
        if self.room.adjuster is None:
            return {}
        totals = self.core.scheduler.metrics.totals()
        return {name: totals[name] for name in ("missed", "predicted", "foreseen", "exposed_s")}

    def _cell(self, cell: Cell) -> list[Any]:
        place = [cell.workload, cell.routing, cell.kv_gib, self.args.tp, self.args.bus_gb_s]
        return [*place, cell.rate, cell.has_logprobs]

    @property
    def _policy(self) -> str | None:
        return (self.system.policy or str(self.args.policy)) if self.system.is_elastic else None


@contextmanager
def turn(path: Path | None, *, with_others: bool = False) -> Iterator[None]:
    """Wait until no other process that shares the file is inside, but those that may be with others if this one may.

    At once without a file.
    """
    if path is None:
        yield
        return
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH if with_others else fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile holds the open file
    time.sleep(TURN_S)


def run(args: Namespace) -> None:
    """Run one system through the cells of the command line."""
    needs.engine()
    cells = parse_cells(args.cells)
    for cell in cells:  # so that one without requests or room is refused before the engine starts
        plan_arrivals(cell, _sizes(args))
        if cell.kv_gib > args.max_kv_gib:
            raise BadScenario(f"wanted {cell.kv_gib:g} GiB for KV, there are {args.max_kv_gib:g}: raise --max-kv-gib")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with turn(args.turns, with_others=True):
        bench = Bench(args)
    bench.run(cells)


def _sizes(args: Namespace) -> Sizes:
    return Sizes(args.requests, args.seconds, args.max_model_len, args.seed)


def _key(cell: list[Any], repeat: int) -> str:
    return json.dumps([*cell, repeat])


def _read_plans(path: Path | None) -> dict[str, Noted]:
    entries = [] if path is None else read_lines(tokens_path(path))
    if path is not None and not entries:
        raise BadScenario(f"--follow {path}: want a run with {tokens_path(path)} beside it, there is nothing in it")
    return {_key(entry["cell"], entry["repeat"]): entry["plans"] for entry in entries}


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, separators=(",", ":")) + "\n")
