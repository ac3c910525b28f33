"""Times work in CUDA graphs: one graph holds a call per input set, so that no set finds its weights in the cache."""

import statistics
from collections.abc import Callable, Sequence

import torch


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, one after the other; each has run before, so that nothing compiles in it."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """The time of one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def median_us(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """The median time of a call."""
    graph = capture(calls)
    for _ in range(2):
        graph.replay()
    return statistics.median(replay_us(graph) for _ in range(repeats)) / len(calls)


def interleaved_us(graphs: Sequence[torch.cuda.CUDAGraph], calls: int, repeats: int) -> list[list[float]]:
    """Times of each graph, a call, taken in turns so that drifting clocks meet all alike."""
    for graph in graphs:
        for _ in range(2):
            graph.replay()
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats):
        for graph, runs in zip(graphs, times, strict=True):
            runs.append(round(replay_us(graph) / calls, 2))
    return times
