"""The cells of the simulator's table: what is served on what, with how much room for KV, and what comes in.

Traces are sub-sampled: 100 requests in a row of the conversations, 150 of the code, from the middle, prompts
cut at 4,096 tokens less the answer. Gaps are halved on the H200 and stretched elsewhere by memory bandwidth, so that
each GPU is about as busy. A burst is 192 requests at once, beside a trickle of one a second that goes on after it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from elasticmoe.runtime.contract.config import PolicyName, RuntimeConfig
from elasticmoe.runtime.simulator.hardware import GPUS, H200, Gpu
from elasticmoe.runtime.simulator.outcome import Outcome, Slo
from elasticmoe.runtime.simulator.requests import Arrival
from elasticmoe.runtime.simulator.routing import Routing, RoutingName, make_routing
from elasticmoe.runtime.simulator.served import ServedModel, read_served
from elasticmoe.runtime.simulator.simulation import Simulation
from elasticmoe.runtime.simulator.system import System
from elasticmoe.runtime.simulator.workload import burst_then_calm, closed_batch, excerpt, read_trace

FOLDER = Path(__file__).resolve().parent.parent
MODEL = "qwen3-30b-a3b"
ROUTINGS: tuple[RoutingName, ...] = ("flat", "skewed")
KV_GIB = (0.5, 1.0, 2.0, 4.0, 8.0)
WORKLOADS = ("closed", "conversation", "code", "burst")
POLICIES: tuple[PolicyName | None, ...] = (None, "threshold", "fixed", "goodput")
MAX_TOKENS = 4096
SLO = Slo(ttft_s=5.0)
"""What rows are judged by; no policy of the table is told of the first token."""
NUM_BURST, CALM_S, CALM_RATE_S = 192, 15.0, 1.0
HALVED = 0.5
EXCERPTS = {"conversation": ("azure-2023-conv.csv", 8000, 100), "code": ("azure-2023-code.csv", 4000, 150)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the table; its policies are compared with stock in the same place."""

    gpu: str
    routing: RoutingName
    kv_gib: float
    """Of all GPUs of the group together."""
    workload: str
    seed: int = 0
    """Of what the router draws."""
    later: int = 0
    """Requests of a trace between the table's excerpt and this one; below 0: earlier."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one cell."""

    model: str
    gpu: str
    routing: RoutingName
    kv_gib: float
    workload: str
    policy: str
    ratio_to_stock: float
    tpot_ok: bool
    ttft_ok: bool
    tok_s: float
    tpot_p99_ms: float
    ttft_p99_ms: float
    peak_concurrency: int
    steps: int
    preemptions: int
    evicted: int
    loaded: int
    swapped: int
    exposed_s: float
    recovery_s: float | None
    """Of a burst: from the first room for all experts to all of them home; None: no burst, or not all came home."""
    recovery_copy_s: float | None
    """What those experts' copies alone take."""


def list_cells(gpus: tuple[str, ...] = tuple(GPUS)) -> Iterator[Cell]:
    """Return every cell, GPU by GPU."""
    for place in product(gpus, ROUTINGS, KV_GIB, WORKLOADS):
        yield Cell(*place)


@cache
def serve(gpu: str) -> ServedModel:
    """Return the model as a GPU or a group of them serves it."""
    return read_served(FOLDER / "models" / f"{MODEL}.json", GPUS[gpu].num_gpus)


@cache
def route(routing: RoutingName) -> Routing:
    """Return the model's routing, the same for all policies and GPUs."""
    shape = serve(H200.name).shape
    return make_routing(routing, shape.num_layers, shape.num_experts, shape.top_k)


def slowness(gpu: Gpu) -> float:
    """Return how much longer than the H200 a GPU or group reads the same bytes."""
    return H200.memory_bytes_s / (gpu.memory_bytes_s * gpu.num_gpus)


@cache
def offer(workload: str, gpu: str, later: int = 0) -> tuple[Arrival, ...]:
    """Return the requests of a workload, as fast as this GPU is; those of a trace so many requests later."""
    slow = slowness(GPUS[gpu])
    if workload == "closed":
        return closed_batch()
    if workload == "burst":
        return burst_then_calm(closed_batch(NUM_BURST), CALM_S * slow, CALM_RATE_S / slow)
    file, first, num = EXCERPTS[workload]
    return excerpt(read_trace(FOLDER / "data" / file), first + later, num, HALVED * slow, MAX_TOKENS)


def make_system(cell: Cell, policy: PolicyName | None, limit: int | None = None) -> System:
    """Return the system that a policy makes of a cell."""
    gpu = GPUS[cell.gpu]
    return System(
        model=serve(cell.gpu),
        gpu=gpu,
        kv_bytes=int(cell.kv_gib * 2**30) // gpu.num_gpus,
        config=None if policy is None else RuntimeConfig(policy=policy),
        limit=limit,
        routing=cell.routing,
        max_model_len=MAX_TOKENS,
        seed=cell.seed,
    )


def simulate(cell: Cell, policy: PolicyName | None, limit: int | None = None) -> Outcome:
    """Return what a policy does in a cell."""
    offered = offer(cell.workload, cell.gpu, cell.later)
    return Simulation(make_system(cell, policy, limit), offered, route(cell.routing)).run()


def make_row(cell: Cell, policy: PolicyName | None, outcome: Outcome, stock_tok_s: float) -> Row:
    """Return a policy's row beside stock's tokens/s in the same cell."""
    expert_s = serve(cell.gpu).expert_bytes / GPUS[cell.gpu].copy_bytes_s
    recovery = outcome.recovery(expert_s) if cell.workload == "burst" else None
    has_recovered = recovery is not None and recovery.took_s < float("inf")
    tpot_s, ttft_s = outcome.tpot_s(0.99), outcome.ttft_s(0.99)
    evicted, loaded, swapped = outcome.moved
    return Row(
        model=MODEL,
        gpu=cell.gpu,
        routing=cell.routing,
        kv_gib=cell.kv_gib,
        workload=cell.workload,
        policy=policy or "stock",
        ratio_to_stock=round(outcome.tok_s / stock_tok_s, 4),
        tpot_ok=tpot_s <= SLO.tpot_s,
        ttft_ok=ttft_s <= SLO.ttft_s,
        tok_s=round(outcome.tok_s, 1),
        tpot_p99_ms=round(tpot_s * 1e3, 1),
        ttft_p99_ms=round(ttft_s * 1e3, 1),
        peak_concurrency=outcome.peak,
        steps=outcome.num_steps,
        preemptions=outcome.num_preemptions,
        evicted=evicted,
        loaded=loaded,
        swapped=swapped,
        exposed_s=round(outcome.trail.exposed_s, 3),
        recovery_s=round(recovery.took_s, 3) if recovery is not None and has_recovered else None,
        recovery_copy_s=None if recovery is None else round(recovery.copy_s, 3),
    )


def make_rows(cell: Cell, policies: tuple[PolicyName | None, ...], stock_tok_s: float | None = None) -> list[Row]:
    """Return the rows of policies in a cell; stock is the first of them, or its tokens/s are known already."""
    rows: list[Row] = []
    for policy in policies:
        outcome = simulate(cell, policy)
        stock_tok_s = outcome.tok_s if stock_tok_s is None else stock_tok_s
        rows.append(make_row(cell, policy, outcome, stock_tok_s))
    return rows
