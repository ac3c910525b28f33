"""`make demo-local`: a burst of requests too large for stock vLLM's memory, by elasticmoe and by stock.

Makes a tiny model, starts both servers on it with the same bytes, streams a chat completion, sends the same burst to
both, and prints what happened. Exits with 1 if anything it promises did not hold.
"""

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/demo.py` finds `bench`

from bench.serving import needs
from bench.serving.arguments import count
from bench.serving.burst import BurstResult
from bench.serving.client import OpenAIClient
from bench.serving.errors import BenchError
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import ROOT
from bench.serving.model import ensure_tiny_model
from bench.serving.progress import say
from bench.serving.report import (
    ELASTIC,
    STOCK,
    check_promises,
    make_row,
    show_arena,
    show_promises,
    show_side_by_side,
    show_sizing,
)
from bench.serving.scenario import (
    FLAGS,
    Load,
    Scenario,
    make_scenario,
    measure,
    start_elastic,
    start_stock,
    wait_both,
    warm_up,
)
from bench.serving.server import MODEL_NAME, Server, exit_on_sigterm
from bench.serving.trace import mean_lengths

QUESTION = "Where do the experts go when many people ask at once?"
ANSWER_TOKENS = 48
CHAT_TIMEOUT_S = 60.0
DEFAULT_LOGS = ROOT / "build" / "demo"


def write(text: str) -> None:
    """Print a piece of a streamed answer as it comes."""
    print(text, end="", flush=True)


async def chat(base_url: str, model: str) -> None:
    """Stream one chat completion to the terminal."""
    async with OpenAIClient(base_url, model, CHAT_TIMEOUT_S) as client:
        print(f"  user:      {QUESTION}\n  assistant: ", end="")
        answer = await client.chat(QUESTION, ANSWER_TOKENS, lambda text: write(text.replace("\n", "\n             ")))
    print(f"\n  ({len(answer.token_ids)} tokens of a random model, the first after {answer.ttft_s * 1e3:.0f} ms)")


def describe(scenario: Scenario) -> str:
    """The burst in a few lines."""
    (prompt, output), scaling = mean_lengths(scenario.lengths), scenario.scaling
    return (
        f"{len(scenario.lengths)} requests, mean {prompt:.0f} tokens in and {output:.0f} out: lengths of the Azure "
        f"2023 conversation trace, prompts / {1 / scaling.prompt:.1f} and outputs / {1 / scaling.output:.1f}.\n"
        + show_sizing(scenario.sizing, len(scenario.lengths), FLAGS.block_size)
    )


def serve_elastic(server: Server, scenario: Scenario, seed: int) -> BurstResult:
    """Chat, burst and calm on the elastic server."""
    say("One chat completion from elasticmoe, streamed:")
    asyncio.run(chat(server.spec.base_url, MODEL_NAME))
    warm_up(server, scenario, say)
    say("The burst on elasticmoe")
    result = measure(server, scenario, seed, say)
    say(f"All answered after {result.wall_s:.1f} s; " + describe_calm(result))
    return result


def describe_calm(result: BurstResult) -> str:
    """Whether the experts came back, and when."""
    if result.is_calm:
        return f"all experts are back {result.calm_s:.1f} s later"
    return f"{result.calm_s:.0f} s later the experts are NOT all back: gave up waiting"


def serve_stock(server: Server, scenario: Scenario, seed: int) -> BurstResult:
    """The same burst on stock vLLM."""
    warm_up(server, scenario, say)
    say("The same burst on stock vLLM with the same bytes")
    result = measure(server, scenario, seed, say)
    say(f"All answered after {result.wall_s:.1f} s")
    return result


def run_both(scenario: Scenario, logs: Path, seed: int) -> tuple[BurstResult, BurstResult]:
    """The results on the elastic and the stock server; both start together, each works alone."""
    say(f"Starting elasticmoe and stock vLLM (about a minute; logs in {logs})")
    with start_elastic(scenario, logs) as elastic, start_stock(scenario, logs) as stock:
        wait_both(elastic, stock, say)
        elastic_result = serve_elastic(elastic, scenario, seed)
        elastic.stop()
        return elastic_result, serve_stock(stock, scenario, seed)


def report(elastic: BurstResult, stock: BurstResult) -> bool:
    """Print the comparison; whether every promise was kept."""
    rows = make_row(ELASTIC, 0, elastic, stock), make_row(STOCK, 0, stock, stock)
    promises = check_promises(elastic, stock)
    print(f"\nWho held the arena on elasticmoe:\n{show_arena(elastic)}")
    print(f"\nThe same burst, the same bytes:\n{show_side_by_side(*rows)}")
    print(f"\nPromises:\n{show_promises(promises)}\n")
    return all(promise.holds for promise in promises)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Qwen3-MoE checkpoint (default: the tiny model, made if missing)")
    parser.add_argument(
        "--requests", type=count, default=Load().num_requests, help="requests in the burst (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws lengths and prompts (%(default)s)")
    parser.add_argument("--logs", type=Path, default=DEFAULT_LOGS, help="folder of the servers' logs (%(default)s)")
    return parser.parse_args()


def main() -> int:
    """0 if every promise was kept."""
    args = parse_args()
    exit_on_sigterm()
    try:
        needs.engine()
        model = args.model or ensure_tiny_model(say)
        scenario = make_scenario(model, Load(num_requests=args.requests, seed=args.seed))
        say(describe(scenario))
        is_kept = report(*run_both(scenario, args.logs, args.seed))
    except BenchError as error:
        say(f"The demo failed: {error}")
        return 1
    say("Every promise was kept." if is_kept else "A promise was BROKEN, see above.")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
