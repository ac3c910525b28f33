"""The demo's two servers, faked in this process: they answer at once and report the metrics they are given."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.serving.scenario import Scenario
from bench.serving.server import ServerSpec
from tests.fakes.openai_server import ANSWERED, FakeOpenAIServer, Script

ELASTIC_METRICS = f"""\
elasticmoe_arena_bytes{{owner="expert"}} 4096.0
elasticmoe_resident_experts 128.0
elasticmoe_adjuster_changes_total{{kind="evict"}} {ANSWERED}
elasticmoe_adjuster_changes_total{{kind="load"}} {ANSWERED}
vllm:generation_tokens_total {ANSWERED}0
vllm:iteration_tokens_total_count {ANSWERED}
vllm:num_preemptions_total 0.0
"""
STOCK_METRICS = f"""\
vllm:generation_tokens_total {ANSWERED}
vllm:iteration_tokens_total_count {ANSWERED}
vllm:num_preemptions_total {ANSWERED}
"""


class InProcessServer:
    """Stands in for `bench.serving.server.Server`; counts how often it was stopped."""

    def __init__(self, name: str, metrics: str, log: Path) -> None:
        self._fake = FakeOpenAIServer(Script(metrics=metrics))
        self._log = log
        self._name = name
        self.num_stops = 0

    @property
    def spec(self) -> ServerSpec:
        """Where it answers."""
        port = int(self._fake.base_url.rpartition(":")[2])
        return ServerSpec(self._name, (), port, self._log)

    def __enter__(self) -> Self:
        self._fake.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fake.__exit__(kind, error, trace)

    def wait_healthy(self, _: float, __: Callable[[str], None]) -> float:
        """Healthy at once."""
        return 0.0

    def stop(self) -> None:
        """Count the call; the `with` block's end stops it."""
        self.num_stops += 1


def make_starter(name: str, metrics: str) -> Callable[[Scenario, Path], InProcessServer]:
    """What takes the place of `start_elastic` or `start_stock`."""
    return lambda _, folder: InProcessServer(name, metrics, folder / "log")
