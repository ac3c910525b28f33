"""Runs kubectl and helm as a user would, on one kubeconfig; what they refuse is a ClusterFailed with their own words.

Called by the Kubernetes demo, its benches and the tests on a cluster.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving.errors import BenchError

Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""

TIMEOUT_S = 60.0
POLL_S = 0.5
SAY_EVERY_S = 15.0


class ClusterFailed(BenchError):
    """A command on the cluster failed, or what it should bring about did not come in time."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """One cluster, by its kubeconfig (None: kubectl's own choice), and the namespace of whatever names no other."""

    kubeconfig: str | None = None
    namespace: str = "default"

    def run(self, *args: str, stdin: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
        """Return what `kubectl args` prints."""
        return self._run("kubectl", ("--namespace", self.namespace, *args), stdin, timeout_s)

    def helm(self, *args: str) -> str:
        """Return what `helm args` prints."""
        return self._run("helm", args, None, 2 * TIMEOUT_S)

    def apply(self, *objects: Object) -> None:
        """Apply objects as they are."""
        self.run("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def get(self, kind: str, name: str) -> Object | None:
        """Return an object, None if there is none."""
        text = self.run("get", kind, name, "--ignore-not-found", "-o", "json")
        found: Object | None = json.loads(text) if text.strip() else None
        return found

    def find(self, kind: str, label: str, *flags: str) -> list[Object]:
        """Return the objects of a kind that have a label."""
        items: list[Object] = json.loads(self.run("get", kind, "-l", label, *flags, "-o", "json"))["items"]
        return items

    def command(self, *args: str) -> list[str]:
        """Return the command line of `kubectl args`, for a process of its own."""
        return ["kubectl", *self._where(), "--namespace", self.namespace, *args]

    def _where(self) -> tuple[str, ...]:
        return ("--kubeconfig", self.kubeconfig) if self.kubeconfig else ()

    def _run(self, program: str, args: Sequence[str], stdin: str | None, timeout_s: float) -> str:
        command = [program, *self._where(), *args]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
        except FileNotFoundError as error:
            raise ClusterFailed(f"need {program} on PATH, there is none; PATH is {os.environ.get('PATH')}") from error
        except subprocess.TimeoutExpired as error:
            raise ClusterFailed(f"wanted `{' '.join(command)}` to end within {timeout_s:g} s, it did not") from error
        if done.returncode != 0:
            raise ClusterFailed(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


def wait_until(what: str, look: Callable[[], str | None], timeout_s: float, say: Callable[[str], None]) -> float:
    """Return the seconds until `look` returns None; until then it returns how things stand, which is said now and then.

    Raises ClusterFailed with how things stood last.
    """
    started_s = said_s = time.monotonic()
    while (state := look()) is not None:
        now_s = time.monotonic()
        if now_s - started_s > timeout_s:
            raise ClusterFailed(f"wanted {what} within {timeout_s:g} s; it stands so: {state}")
        if now_s - said_s >= SAY_EVERY_S:
            say(f"waiting for {what}, {now_s - started_s:.0f} s so far: {state}")
            said_s = now_s
        time.sleep(POLL_S)
    return time.monotonic() - started_s


def find_condition(obj: Object | None, kind: str) -> Object:
    """Return one of an object's conditions; empty if it has none such."""
    conditions: list[Object] = ((obj or {}).get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def show_condition(condition: Object) -> str:
    """Return a condition in one line."""
    if not condition:
        return "no such condition yet"
    return f"{condition['type']}={condition['status']} {condition['reason']}: {condition.get('message', '')}"
