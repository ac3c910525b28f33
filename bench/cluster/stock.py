"""Stock vLLM beside a custom resource's workers: the same pod with another command, and a Service of its own.

Called by the Kubernetes demo, to compare tokens and speed.
"""

from collections.abc import Sequence
from copy import deepcopy

from bench.cluster.install import PORT, READY_S, Say
from bench.cluster.kubectl import ClusterFailed, Kubectl, Object, find_condition, show_condition, wait_until

NAME = "stock-vllm"
LABELS = {"app.kubernetes.io/name": NAME}


def start_stock(kube: Kubectl, resource: str, flags: Sequence[str]) -> None:
    """Start stock vLLM, with `flags` in place of ours, in a copy of the resource's worker."""
    worker = kube.get("deployment", f"{resource}-worker")
    if worker is None:
        raise ClusterFailed(f"want the workers of {resource}, there are none; see `kubectl get emoe {resource}`")
    kube.apply(build_deployment(worker, flags), _build_service())


def wait_stock(kube: Kubectl, say: Say) -> float:
    """Return the seconds until it answers."""

    def look() -> str | None:
        condition = find_condition(kube.get("deployment", NAME), "Available")
        return None if condition.get("status") == "True" else show_condition(condition)

    return wait_until("stock vLLM", look, READY_S, say)


def stop_stock(kube: Kubectl) -> None:
    """Remove it."""
    kube.run("delete", "deployment,service", "-l", f"app.kubernetes.io/name={NAME}", "--ignore-not-found")


def build_deployment(worker: Object, flags: Sequence[str]) -> Object:
    """Return a Deployment of stock vLLM: a worker's, without our plugin, its socket and its affinity to a pool."""
    template = deepcopy(worker["spec"]["template"])
    template["metadata"] = {"labels": LABELS}
    pod_spec = template["spec"]
    pod_spec.pop("affinity", None)
    pod_spec["volumes"] = [volume for volume in pod_spec["volumes"] if volume["name"] != "pool"]
    (main,) = [container for container in pod_spec["containers"] if container["name"] == "main"]
    main["volumeMounts"] = [mount for mount in main["volumeMounts"] if mount["name"] != "pool"]
    main["command"] = ["python3", "-m", "vllm.entrypoints.cli.main", "serve"]
    main["args"] = [*_kept(main["args"]), *flags]
    main["env"] = [*main.get("env", []), {"name": "VLLM_PLUGINS", "value": ""}]
    main["resources"]["requests"]["cpu"] = "250m"
    spec = {"replicas": 1, "selector": {"matchLabels": LABELS}, "strategy": {"type": "Recreate"}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME, "labels": LABELS}, "spec": spec}


def _kept(args: Sequence[str]) -> list[str]:
    """Return a worker's arguments without ours, each of which has a value of its own after it."""
    kept, words = [], iter(args)
    for word in words:
        if word.startswith("--elastic-"):
            next(words)
        else:
            kept.append(word)
    return kept


def _build_service() -> Object:
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "labels": LABELS},
        "spec": {"selector": LABELS, "ports": ports},
    }
