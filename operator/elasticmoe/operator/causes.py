"""Why pods are not ready, in the words of scheduler, kubelet and controllers; status makes conditions of it.

Pure, as status: it reads nothing but what was observed.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from elasticmoe.operator.observed import Container, End, Object, Pod

_PULL: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError", "InvalidImageName"}
    | {"RegistryUnavailable", "SignatureValidationFailed"}
)
_CRASH_LOOP: Final = "CrashLoopBackOff"
_UNDERWAY: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
_PLAIN_ENDS: Final = frozenset({"", "Error", "Completed"})
_STEADY_S: Final = 600.0
"""The kubelet forgets former crashes of a container that ran so long."""
_TELLING: Final = re.compile(r"error\b|^elasticmoe: ", re.IGNORECASE)
"""What a line of a log has that says why a process ended: a traceback's last one, or our own. Others may follow it."""
_MAX_TEXT: Final = 400
_PRIVILEGED: Final = "pods here mount folders of the node, which only Pod Security level privileged allows"
_RELABEL: Final = "label the namespace pod-security.kubernetes.io/enforce=privileged or use another"


@dataclass(frozen=True, slots=True)
class Cause:
    """What keeps pods from being ready."""

    reason: str | None
    """None if nothing has failed: it may only take time."""
    message: str


def find_cause(pods: Iterable[Pod], namespace: str) -> Cause | None:
    """Return what keeps back the first pod for which something failed, else the first that has not started.

    Pods that are ready or leaving have no say.
    """
    late = (pod for pod in pods if not pod.is_ready and not pod.is_leaving)
    causes = [cause for pod in late for cause in _causes(pod, namespace)]
    return min(causes, key=lambda cause: cause.reason is None, default=None)


def find_refusal(deployment: Object) -> Cause | None:
    """Return why the API server lets no pods of a Deployment be made, if so."""
    for found in deployment.get("status", {}).get("conditions") or ():
        if found["type"] == "ReplicaFailure" and found["status"] == "True":
            message = found.get("message", "")
            hint = f"; {_PRIVILEGED}: {_RELABEL}" if "PodSecurity" in message else ""
            return Cause("PodsRefused", message + hint)
    return None


def explain_no_pods(daemonset: str, namespace: str) -> str:
    """Return what to look at if a DaemonSet has no pod; unlike a Deployment it has no condition that says why."""
    return (
        f"none is made yet; if that lasts, `kubectl -n {namespace} describe daemonset {daemonset}` tells why, "
        f"perhaps that {_PRIVILEGED}: {_RELABEL}"
    )


def _causes(pod: Pod, namespace: str) -> Iterator[Cause]:
    if pod.unschedulable is not None:
        yield Cause("Unschedulable", f"{pod.name}: {pod.unschedulable}")
    for container in pod.containers:
        if not container.is_ready and (cause := _container_cause(container, pod.name, namespace)):
            yield cause


def _container_cause(container: Container, pod: str, namespace: str) -> Cause | None:
    """Return why a container is not ready; None if it runs for the first time."""
    whose, waiting = f"{pod}: {container.name}", container.waiting
    end = container.end or container.past_end
    said = f" ({waiting}){_after_colon(container.waiting_message)}; "
    describe = f"`kubectl -n {namespace} describe pod {pod}`"
    if waiting in _PULL:
        return Cause("ImagePullFailed", f"{whose} has no image{said}mend its name or spec.imagePullSecrets")
    if end is not None and waiting in {None, _CRASH_LOOP}:
        past = " --previous" if container.end is None else ""
        logs = f"`kubectl -n {namespace} logs {pod} -c {container.name}{past}`"
        reason = "CrashLooping" if _is_looping(container, end) else "Restarting"
        return Cause(reason, f"{whose} ended with {_show_end(end)}, restarts: {container.restarts}; see {logs}")
    if waiting in _UNDERWAY:
        wait = "waits for its image, its volumes (is the model's folder there?) or another container"
        return Cause(None, f"{whose} {wait}; if that lasts, {describe} tells for which")
    return Cause("StartFailed", f"{whose} can't be started{said}see {describe}") if waiting is not None else None


def _is_looping(container: Container, end: End) -> bool:
    return container.waiting == _CRASH_LOOP or (container.restarts > 1 and end.ran_s < _STEADY_S)


def _show_end(end: End) -> str:
    """Return an exit code, the kubelet's word for it if that says more, and the line of the log that tells most."""
    word = "" if end.reason in _PLAIN_ENDS else f" ({end.reason})"
    lines = [line.strip() for line in end.message.splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if _TELLING.search(line)), lines[-1] if lines else "")
    return f"exit code {end.exit_code}{word}{_after_colon(line)}"


def _after_colon(text: str) -> str:
    return f": {text[:_MAX_TEXT]}" if text else ""
