"""Times how long a custom resource takes to be Ready, cold and warm, on the cluster that `make demo` left.

Cold: the resource is applied where nothing of it is, so its coordinator starts and reads the checkpoint. Warm: its
worker's pod is killed, and the next one attaches to the pool that the coordinator kept. Both are the seconds from the
command to Ready=True, with images and the checkpoint on the node's disk, of which a cold start finds nothing in memory.
The result holds the checkpoint bytes that were read. Needs 13 GiB of the node's memory for the preset `medium`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/ready_times.py` finds `bench`

import httpx
import yaml

from bench.cluster.install import (
    MODELS_ON_NODE,
    Target,
    add_binaries_to_path,
    find_target,
    install_chart,
    put_model,
    run_on_models,
    wait_gone,
    wait_ready,
)
from bench.cluster.kubectl import Kubectl, wait_until
from bench.cluster_demo import EXAMPLE
from bench.serving.arguments import count, new_file
from bench.serving.errors import BenchError
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import ROOT, collect_meta
from bench.serving.metrics import parse
from bench.serving.progress import say
from elasticmoe.runtime.cli.staging import write_whole

OUT = ROOT / "bench" / "results" / "ready-times.json"
NAME = "timed"
MEMORY = {  # by preset; what is not here is the example's
    "tiny": {},
    "medium": {"arena": "2Gi", "expertOffload": {"limit": 56}, "hostPool": {"size": "6200Mi", "headroom": "256Mi"}},
}
FORGET = "sync; python3 -c 'import os, sys; [os.posix_fadvise(os.open(f, 0), 0, 0, 4) for f in sys.argv[1:]]'"
"""Drops files from the page cache; 4 is POSIX_FADV_DONTNEED."""
BYTES_READ = "elasticmoe_checkpoint_bytes_read_total"


@dataclass(frozen=True, slots=True)
class Start:
    """One start: the seconds from the command to Ready, and the bytes read from the checkpoint for it."""

    repeat: int
    path: str
    seconds: float
    bytes_read: int


def bytes_read(kube: Kubectl) -> int:
    """Return what the coordinator has read of the checkpoint since its start."""
    (pod,) = kube.find("pod", f"elasticmoe.io/deployment={NAME},app.kubernetes.io/component=coordinator")
    answer = httpx.get(f"http://{pod['status']['podIP']}:9401/metrics", timeout=10, trust_env=False)
    return int(parse(answer.raise_for_status().text, 0.0).get(BYTES_READ))


def start_cold(kube: Kubectl, preset: str, repeat: int) -> Start:
    """Apply the resource and wait."""
    resource = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    resource["metadata"]["name"] = NAME
    resource["spec"]["model"]["uri"] = f"path://{MODELS_ON_NODE}/{preset}"
    resource["spec"]["memory"] |= MEMORY[preset]
    started_s = time.monotonic()
    kube.apply(resource)
    wait_ready(kube, NAME, say)
    return Start(repeat, "cold", round(time.monotonic() - started_s, 2), bytes_read(kube))


def start_warm(kube: Kubectl, repeat: int) -> Start:
    """Kill the worker's pod and wait."""
    label = f"elasticmoe.io/deployment={NAME},app.kubernetes.io/component=worker"
    (pod,) = kube.find("pod", label)
    before, started_s = bytes_read(kube), time.monotonic()
    kube.run("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")

    def look() -> str | None:
        new = [one for one in kube.find("pod", label) if one["metadata"]["uid"] != pod["metadata"]["uid"]]
        is_ready = bool(new) and all(
            condition["status"] == "True"
            for condition in new[0]["status"].get("conditions", [])
            if condition["type"] == "Ready"
        )
        return None if is_ready and new[0]["status"].get("phase") == "Running" else "the next pod is starting"

    wait_until("the next worker", look, 300, say)
    wait_ready(kube, NAME, say)
    return Start(repeat, "warm", round(time.monotonic() - started_s, 2), bytes_read(kube) - before)


def run_repeat(target: Target, preset: str, repeat: int) -> list[Start]:
    """Return one cold and one warm start."""
    run_on_models(target, "forget-model", f"{FORGET} /models/{preset}/*.safetensors", say)
    starts = [start_cold(target.kube, preset, repeat), start_warm(target.kube, repeat)]
    for start in starts:
        say(f"{start.path}: Ready after {start.seconds:.1f} s, {start.bytes_read} bytes of the checkpoint read")
    target.kube.run("delete", "emoe", NAME)
    wait_gone(target.kube, NAME, say)
    return starts


def main() -> int:
    """0 if warm starts are quicker and read nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=3, help="of each (%(default)s)")
    parser.add_argument("--preset", choices=sorted(MEMORY), default="medium", help="the model (%(default)s)")
    parser.add_argument("--out", type=new_file, default=OUT, help="the result (%(default)s)")
    args = parser.parse_args()
    add_binaries_to_path()
    meta = collect_meta()
    try:
        target = find_target(os.environ)
        install_chart(target, say)
        put_model(target, args.preset, say)
        target.kube.run("delete", "emoe", NAME, "--ignore-not-found")  # of a run that was broken off
        wait_gone(target.kube, NAME, say)
        starts = [start for repeat in range(args.repeats) for start in run_repeat(target, args.preset, repeat)]
    except BenchError as error:
        say(f"failed: {error}")
        return 1
    medians = {path: statistics.median(s.seconds for s in starts if s.path == path) for path in ("cold", "warm")}
    result = {"meta": asdict(meta), "preset": args.preset, "median_s": medians, "starts": [asdict(s) for s in starts]}
    write_whole(args.out, json.dumps(result, indent=2) + "\n")
    is_kept = medians["warm"] < medians["cold"] and not any(s.bytes_read for s in starts if s.path == "warm")
    say(f"wrote {args.out}: cold {medians['cold']:.1f} s, warm {medians['warm']:.1f} s (medians)")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
