"""`make demo`: one custom resource becomes a server on Kubernetes, and takes a burst that stock vLLM can't hold.

On the cluster that `cluster/up` started, or with CLUSTER=existing on the one that kubectl is set to: installs the
chart, makes a tiny model on the node, applies examples/tiny-qwen3-moe.yaml, waits until it is Ready, streams a chat
completion through its Service, sends the burst to it and to stock vLLM in the same kind of pod, and prints what
happened. Leaves all of it up but for stock vLLM. Exits with 1 if anything it promises did not hold. `--remove` takes it
off an existing cluster; for our own there is `make down`.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/cluster_demo.py` finds `bench`

import yaml

from bench.cluster.install import (
    Target,
    add_binaries_to_path,
    find_cluster,
    find_target,
    install_chart,
    need_programs,
    put_model,
    remove,
    wait_ready,
    wait_taken_over,
)
from bench.cluster.kubectl import Object
from bench.cluster.reach import reach
from bench.cluster.stock import NAME as STOCK_NAME
from bench.cluster.stock import start_stock, stop_stock, wait_stock
from bench.demo import chat, describe, describe_calm, report
from bench.serving.burst import BurstResult, Watch, run_burst
from bench.serving.errors import BenchError
from bench.serving.meta import ROOT
from bench.serving.model import ensure_tiny_model
from bench.serving.progress import say
from bench.serving.scenario import NUM_WARM_UP, WARM_UP_SEED, Load, Scenario, make_scenario
from bench.serving.server import exit_on_sigterm

EXAMPLE = ROOT / "examples" / "tiny-qwen3-moe.yaml"
LOGS = ROOT / "build" / "cluster-demo"
STATUS_PARTS = {
    "conditions": ("type", "status", "reason", "message"),
    "coordinators": ("nodeName", "podName", "poolBytes", "leases"),
    "pods": ("name", "requestedLimit", "effectiveLimit", "residentExperts"),
}


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo works with: the cluster, the custom resource, the burst."""

    target: Target
    resource: Object
    scenario: Scenario

    @property
    def name(self) -> str:
        """Name of the resource, its Service and its model."""
        return str(self.resource["metadata"]["name"])


def make_demo() -> Demo:
    """Return the demo of this environment; the model's copy in the cache tells the sizes of the burst."""
    need_programs("kubectl", "helm")
    resource = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return Demo(find_target(os.environ), resource, make_scenario(ensure_tiny_model(say), Load()))


def deploy(demo: Demo) -> None:
    """Bring the custom resource up, from nothing or from whatever a former run left."""
    install_chart(demo.target, say)
    put_model(demo.target, "tiny", say)
    say(f"Applying {EXAMPLE.relative_to(ROOT)}:")
    print("".join(f"    {line}\n" for line in EXAMPLE.read_text(encoding="utf-8").splitlines()), flush=True)
    demo.target.kube.run("apply", "-f", str(EXAMPLE))
    seconds = wait_taken_over(demo.target, demo.name, say) + wait_ready(demo.target.kube, demo.name, say)
    say(f"Ready after {seconds:.0f} s")


def send_burst(url: str, model: str, scenario: Scenario) -> BurstResult:
    """Return the result of the burst, after a few requests that warm the server up."""
    run_burst(url, model, scenario.requests(WARM_UP_SEED)[:NUM_WARM_UP], say, Watch())
    return run_burst(url, model, scenario.requests(0), say, Watch())


def serve_elastic(demo: Demo) -> BurstResult:
    """Chat and burst through the resource's Service."""
    with reach(demo.target, demo.name, LOGS) as url:
        say(f"One chat completion through the Service {demo.name} ({url}), streamed:")
        asyncio.run(chat(url, demo.name))
        say("The burst on elasticmoe")
        result = send_burst(url, demo.name, demo.scenario)
    say(f"All answered after {result.wall_s:.1f} s; " + describe_calm(result))
    return result


def serve_stock(demo: Demo) -> BurstResult:
    """The same burst on stock vLLM in the same kind of pod, with what the experts leave of the same bytes."""
    say("Starting stock vLLM in the same kind of pod, for comparison")
    kube, room = demo.target.kube, str(demo.scenario.sizing.stock_kv_bytes)
    try:
        start_stock(kube, demo.name, ("--kv-cache-memory-bytes", room, "--enforce-eager"))
        wait_stock(kube, say)
        with reach(demo.target, STOCK_NAME, LOGS) as url:
            say("The same burst on stock vLLM with the same bytes")
            result = send_burst(url, demo.name, demo.scenario)
    finally:
        stop_stock(kube)
    say(f"All answered after {result.wall_s:.1f} s")
    return result


def show_resource(demo: Demo) -> None:
    """Print what a user would look at."""
    kube, name = demo.target.kube, demo.name
    print(f"\n$ kubectl get emoe\n{kube.run('get', 'emoe').rstrip()}")
    status = (kube.get("emoe", name) or {}).get("status", {})
    for part, fields in STATUS_PARTS.items():
        print(f"\n{part} in its status:\n{show_table(status.get(part, []), fields)}")
    events = kube.run("get", "events", "--field-selector", f"involvedObject.name={name}", "--sort-by=.lastTimestamp")
    print(f"\n$ kubectl get events\n{events.rstrip()}\n", flush=True)


def show_table(rows: Sequence[Object], fields: Sequence[str]) -> str:
    """Return rows of fields in columns, the last one as wide as it gets."""
    lines = [fields, *([str(row.get(field, "-")) for field in fields] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(fields) - 1)]
    return "\n".join(
        "  " + "".join(f"{text:<{width + 2}}" for text, width in zip(line, [*widths, 0], strict=True)).rstrip()
        for line in lines
    )


def run() -> bool:
    """Return whether every promise was kept."""
    demo = make_demo()
    deploy(demo)
    say(describe(demo.scenario))
    is_kept = report(serve_elastic(demo), serve_stock(demo))
    show_resource(demo)
    say("Every promise was kept." if is_kept else "A promise was BROKEN, see above.")
    if demo.target.is_ours:
        say(f"The cluster stays up: export KUBECONFIG={demo.target.kube.kubeconfig}   (`make down` removes it)")
    return is_kept


def main() -> int:
    """0 if every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remove", action="store_true", help="remove what the demo put on an existing cluster")
    args = parser.parse_args()
    exit_on_sigterm()
    add_binaries_to_path()
    try:
        if args.remove:
            stop_stock(find_cluster(os.environ))
            remove(find_cluster(os.environ), ("tiny",), say)
            return 0
        return 0 if run() else 1
    except BenchError as error:
        say(f"The demo failed: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
