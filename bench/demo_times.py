"""Times `make demo` from nothing and again, and the longest silence between two of its lines.

From nothing means: a fresh clone of the commit at hand, an empty cache folder, and no cache of pip, uv or Go; Debian's
packages stay as they are, and the result says which of those that the demo needs were there. Again means: after `make
down`, with that cache folder. Ends with `make purge` in it. Takes about half an hour and 25 GB of disk; needs root, as
`make demo` does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/demo_times.py` finds `bench`

from bench.serving.arguments import new_file
from bench.serving.errors import BenchError
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import ROOT, collect_meta
from bench.serving.progress import say
from elasticmoe.runtime.cli.staging import write_whole

OUT = ROOT / "bench" / "results" / "demo-times.json"
LOGS = ROOT / "build" / "demo-times"
CACHES = ("UV_CACHE_DIR", "PIP_CACHE_DIR", "GOMODCACHE", "GOCACHE", "XDG_CACHE_HOME")
DEBIAN = ("containerd", "runc", "containernetworking-plugins", "iptables", "conntrack", "buildah", "mmdebstrap", "g++")
GOALS_S = {"cold": 40 * 60, "again": 6 * 60}
LONGEST_SILENCE_S = 30


@dataclass(frozen=True, slots=True)
class Run:
    """One `make demo`."""

    name: str
    seconds: float
    goal_s: float
    longest_silence_s: float
    silent_after: str
    exit_status: int


def time_demo(name: str, checkout: Path, env: Mapping[str, str]) -> Run:
    """Run `make demo`; its output goes to a log."""
    log = LOGS / f"{name}.log"
    started_s = last_s = time.monotonic()
    silence_s, silent_after, last = 0.0, "", ""
    with (
        subprocess.Popen(
            ["make", "demo"], cwd=checkout, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as demo,
        log.open("w", encoding="utf-8") as file,
    ):
        assert demo.stdout is not None
        for line in demo.stdout:
            now_s = time.monotonic()
            if now_s - last_s > silence_s:
                silence_s, silent_after = now_s - last_s, last
            last_s, last = now_s, line.strip()
            file.write(f"{now_s - started_s:7.1f} {line}")
        status = demo.wait()
    if time.monotonic() - last_s > silence_s:
        silence_s, silent_after = time.monotonic() - last_s, last
    seconds = round(time.monotonic() - started_s, 1)
    return Run(name, seconds, GOALS_S[name], round(silence_s, 1), silent_after, status)


def make(target: str, checkout: Path, env: Mapping[str, str]) -> None:
    """Run another target of make."""
    done = subprocess.run(["make", target], cwd=checkout, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"wanted `make {target}`, it failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")


def find_debian_packages() -> list[str]:
    """Return those of Debian's packages that were there before the run."""
    found = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n", *DEBIAN],
        capture_output=True,
        text=True,
        check=False,
    )
    return [line.split()[0] for line in found.stdout.splitlines() if line.split()[1].startswith("ii")]


def run_both(folder: Path) -> list[Run]:
    """Return the run from nothing and the one after it."""
    checkout = folder / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    env = {key: value for key, value in os.environ.items() if key not in {"CLUSTER", "VIRTUAL_ENV", "PYTHONPATH"}}
    env |= {"ELASTICMOE_CACHE": str(folder / "elasticmoe"), **{name: str(folder / name.lower()) for name in CACHES}}
    runs = []
    try:
        for name in GOALS_S:
            say(f"make demo, {name} (log: {LOGS / name}.log)")
            runs.append(time_demo(name, checkout, env))
            say(f"{name}: {runs[-1].seconds:.0f} s, longest silence {runs[-1].longest_silence_s:.0f} s")
            make("down", checkout, env)
    finally:
        make("purge", checkout, env)
    return runs


def main() -> int:
    """0 if both runs succeeded within their goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, default=OUT, help="the result (%(default)s)")
    args = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    meta, packages = collect_meta(), find_debian_packages()
    with tempfile.TemporaryDirectory(prefix="elasticmoe-cold-", dir=Path.home()) as folder:
        runs = run_both(Path(folder))
    result = {"meta": asdict(meta), "debian_packages_there": packages, "runs": [asdict(run) for run in runs]}
    write_whole(args.out, json.dumps(result, indent=2) + "\n")
    is_kept = all(
        r.exit_status == 0 and r.seconds <= r.goal_s and r.longest_silence_s <= LONGEST_SILENCE_S for r in runs
    )
    say(f"wrote {args.out}; every goal was {'reached' if is_kept else 'NOT reached'}")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
