"""Commands as the first process of a namespace, as a container has one: what it does not handle is lost on it."""

import subprocess
from pathlib import Path

import pytest

from bench.serving.server import find_group_members

FIRST_PROCESS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Goes before a command."""


def need_namespaces() -> None:
    """Skip the test where nobody may make a namespace."""
    if subprocess.run([*FIRST_PROCESS, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to make a process namespace (root has it)")


def find_first(outside: int) -> int:
    """Return the first process that process `outside`, which leads its group, has begun a namespace with."""
    (first,) = [pid for pid in find_group_members(outside) if _parent_of(pid) == outside]
    return first


def _parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return int(stat.rpartition(")")[2].split()[1])
