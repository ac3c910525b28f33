"""The comparison that the demo and the CPU bench share: one burst, sized so that stock vLLM is short of KV, on both."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.serving.burst import BurstResult, Watch, run_burst
from bench.serving.errors import BadScenario
from bench.serving.server import MODEL_NAME, Server, elastic_spec, stock_spec
from bench.serving.sizing import Flags, MoEShape, Sizing, read_shape, size_arena
from bench.serving.trace import Lengths, Request, Scaling, draw_lengths, make_requests, read_trace

START_TIMEOUT_S = 300.0
WARM_UP_SEED, NUM_WARM_UP = 999_983, 12
FLAGS = Flags(block_size=16, max_model_len=512, max_num_seqs=48)
FACTORS = tuple(0.97**power for power in range(200))  # 1 … 1/400
# A tiny model makes tokens faster than the API server can send them one by one: in eights, or that is what is measured.
COMMON = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", str(FLAGS.block_size)),
    *("--max-model-len", str(FLAGS.max_model_len), "--max-num-seqs", str(FLAGS.max_num_seqs)),
    *("--max-num-batched-tokens", "1024"),
    *("--stream-interval", "8", "--disable-uvicorn-access-log"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests, and how few of them (`num_held`, of mean length) stock can hold at once.

    They are as long as they can be if at most `max_offloaded` of each layer's experts give way. Outputs shrink
    `output_weight` times less than prompts: at one factor for both, the answers would be over at once.
    """

    num_requests: int = 288
    num_held: int = 6
    output_weight: float = 4.0
    max_offloaded: float = 0.75
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model, the bytes it gets, and the lengths of the burst."""

    model: Path
    shape: MoEShape
    sizing: Sizing
    lengths: tuple[Lengths, ...]
    scaling: Scaling

    def requests(self, seed: int) -> tuple[Request, ...]:
        """The burst with the prompts of a seed: the same lengths, and no prefix in common with another seed's."""
        return make_requests(self.lengths, self.shape.vocab_size, seed)


def make_scenario(model: Path, load: Load) -> Scenario:
    """The longest requests that all fit at once if experts give way, and the arena for them."""
    shape, trace = read_shape(model), read_trace()
    for factor in FACTORS:
        scaling = Scaling(factor, min(1.0, factor * load.output_weight), FLAGS.max_model_len)
        lengths = draw_lengths(trace, load.num_requests, load.seed, scaling)
        sizing = size_arena(shape, FLAGS, lengths, load.num_held)
        if sizing is not None and sizing.limit <= load.max_offloaded * shape.num_experts:
            return Scenario(model, shape, sizing, lengths, scaling)
    num_running = min(load.num_requests, FLAGS.max_num_seqs)
    raise BadScenario(
        f"wanted to hold {num_running} requests at once, offloading {load.max_offloaded:.0%} of the experts "
        "makes no room even for short ones: send fewer requests, or let stock hold more of them"
    )


def start_elastic(scenario: Scenario, folder: Path) -> Server:
    """The elastic server with the whole arena."""
    sizing = scenario.sizing
    elastic = ("--elastic-arena-bytes", str(sizing.arena_bytes), "--elastic-limit", str(sizing.limit))
    policy = ("--elastic-policy", "threshold")  # whenever memory is short, whether or not a CPU gains by it
    return Server(elastic_spec(scenario.model, folder / "elasticmoe.log", (*COMMON, *elastic, *policy)))


def start_stock(scenario: Scenario, folder: Path) -> Server:
    """Stock vLLM with the same bytes: what the experts leave of the arena is its KV."""
    room = ("--kv-cache-memory-bytes", str(scenario.sizing.stock_kv_bytes))
    return Server(stock_spec(scenario.model, folder / "stock.log", (*COMMON, *room)))


def wait_both(elastic: Server, stock: Server, say: Callable[[str], None]) -> None:
    """Return when both servers, started together, are healthy."""
    for server in (elastic, stock):
        seconds = server.wait_healthy(START_TIMEOUT_S, say)
        say(f"{server.spec.name} serves on {server.spec.base_url}, {seconds:.0f} s after its start")


def warm_up(server: Server, scenario: Scenario, say: Callable[[str], None]) -> None:
    """Send a few requests that no burst repeats, so that neither system pays for its first steps within a burst."""
    run_burst(server.spec.base_url, MODEL_NAME, scenario.requests(WARM_UP_SEED)[:NUM_WARM_UP], say, Watch())


def measure(server: Server, scenario: Scenario, seed: int, say: Callable[[str], None]) -> BurstResult:
    """The result of one burst with the prompts of a seed."""
    return run_burst(server.spec.base_url, MODEL_NAME, scenario.requests(seed), say, Watch())
