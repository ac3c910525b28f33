"""Puts the product on a cluster the way its users do: the chart by helm, a model onto the node, a custom resource.

Called by the Kubernetes demo, its benches and the tests on a cluster.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.cluster.kubectl import ClusterFailed, Kubectl, Object, find_condition, show_condition, wait_until
from bench.serving.meta import ROOT
from bench.serving.model import cache_folder

Say = Callable[[str], None]

CHART = ROOT / "charts" / "elasticmoe"
RELEASE, SYSTEM_NAMESPACE = "elasticmoe", "elasticmoe-system"
MODELS_ON_NODE = "/var/lib/elasticmoe/models"
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
INSTALL_S, READY_S, GONE_S, JOB_S = 120.0, 420.0, 60.0, 300.0
PORT = 8000


@dataclass(frozen=True, slots=True)
class Target:
    """Which cluster, and the references that its nodes know the three images by."""

    kube: Kubectl
    is_ours: bool
    images: Mapping[str, str]


def find_target(environ: Mapping[str, str]) -> Target:
    """Return the cluster that `cluster/up` started or, with CLUSTER=existing, the one that kubectl is set to."""
    wanted, cache = environ.get("CLUSTER", ""), cache_folder(environ)
    if wanted == "existing":
        return Target(Kubectl(), is_ours=False, images=find_images(environ))
    if wanted:
        raise ClusterFailed(f"want CLUSTER=existing or no CLUSTER at all, it is {wanted!r}")
    kubeconfig = cache / "cluster" / "run" / "admin.conf"
    if not kubeconfig.exists():
        raise ClusterFailed(f"need a running cluster, there is no {kubeconfig}; run cluster/up")
    return Target(Kubectl(str(kubeconfig)), is_ours=True, images=find_images(environ))


def find_images(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the references of what `images/build` made; without it, and with IMAGE_PREFIX, the chart's own version."""
    refs = Path(environ.get("IMAGES") or cache_folder(environ) / "images") / "refs"
    if refs.exists():
        lines = (line.split() for line in refs.read_text(encoding="utf-8").splitlines())
        return {name: reference for name, reference, _ in lines}
    prefix = environ.get("IMAGE_PREFIX")
    if prefix is None:
        raise ClusterFailed(f"need images, there is no {refs}; run images/build or name a registry's by IMAGE_PREFIX")
    return {name: f"{prefix}elasticmoe-{name}:{VERSION}" for name in ("operator", "coordinator", "runtime")}


def install_chart(target: Target, say: Say) -> None:
    """Install the operator, or upgrade it, and wait until it runs."""
    say(f"Installing the chart into {SYSTEM_NAMESPACE}")
    keys = {"operator": "image", "runtime": "runtimeImage", "coordinator": "coordinatorImage"}
    flags = []
    for name, key in keys.items():
        repository, _, tag = target.images[name].rpartition(":")
        flags += [f"--set={key}.repository={repository}", f"--set={key}.tag={tag}"]
    target.kube.helm(
        "upgrade", "--install", RELEASE, str(CHART), f"--namespace={SYSTEM_NAMESPACE}", "--create-namespace", *flags
    )
    system = Kubectl(target.kube.kubeconfig, SYSTEM_NAMESPACE)
    wait_until("the operator", lambda: _operator_state(system), INSTALL_S, say)


def _operator_state(system: Kubectl) -> str | None:
    (deployment,) = system.find("deployment", f"app.kubernetes.io/instance={RELEASE}")
    status = deployment.get("status", {})
    is_seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    is_ready = is_seen and status.get("readyReplicas") == status.get("updatedReplicas") == 1 == status.get("replicas")
    return None if is_ready else show_condition(find_condition(deployment, "Available"))


def put_model(target: Target, preset: str, say: Say) -> None:
    """Write a small model to the node's disk, by a Job of the runtime's image; a model that is there stays."""
    name = f"make-{preset}-model"
    say(f"Making the model {preset} on the node, in {MODELS_ON_NODE}/{preset}")
    target.kube.run("delete", "job", name, "--ignore-not-found")
    target.kube.apply(_model_job(target, name, preset))
    wait_until(f"the job {name}", lambda: _job_state(target.kube, name), JOB_S, say)
    target.kube.run("delete", "job", name)


def _model_job(target: Target, name: str, preset: str) -> Object:
    """Return the Job; it runs as root because the node's folder is root's."""
    script = f"[ -e /models/{preset}/config.json ] || elasticmoe make-model {preset} /models/{preset} --force"
    container = {
        "name": "main",
        "image": target.images["runtime"],
        "command": ["sh", "-c", script],
        "env": [{"name": "HOME", "value": "/models"}],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    volume = {"name": "models", "hostPath": {"path": MODELS_ON_NODE, "type": "DirectoryOrCreate"}}
    pod_spec = {
        "restartPolicy": "Never",
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
        "containers": [container],
        "volumes": [volume],
    }
    spec = {"backoffLimit": 0, "template": {"spec": pod_spec}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _job_state(kube: Kubectl, name: str) -> str | None:
    job = kube.get("job", name)
    if find_condition(job, "Failed").get("status") == "True":
        raise ClusterFailed(f"the job {name} failed: {kube.run('logs', f'job/{name}')[-2000:]}")
    return None if find_condition(job, "Complete").get("status") == "True" else "it runs"


def wait_ready(kube: Kubectl, name: str, say: Say, timeout_s: float = READY_S) -> float:
    """Return the seconds until a custom resource's newest spec is Ready."""

    def look() -> str | None:
        resource = kube.get("emoe", name)
        condition = find_condition(resource, "Ready")
        is_current = resource is not None and condition.get("observedGeneration") == resource["metadata"]["generation"]
        return None if is_current and condition["status"] == "True" else show_condition(condition)

    return wait_until(f"emoe/{name} to be Ready", look, timeout_s, say)


def wait_taken_over(target: Target, name: str, say: Say) -> float:
    """Return the seconds until the operator that was just installed has given a resource's workers its own image."""

    def look() -> str | None:
        worker = target.kube.get("deployment", f"{name}-worker")
        image = "no" if worker is None else worker["spec"]["template"]["spec"]["containers"][0]["image"]
        return None if image == target.images["runtime"] else f"its workers have {image} image"

    return wait_until(f"the operator to take emoe/{name} over", look, INSTALL_S, say)


def list_children(kube: Kubectl, name: str) -> list[str]:
    """Return what of a custom resource's children is there, as kind/name."""
    found = kube.run("get", "all,serviceaccount", "-l", f"elasticmoe.io/deployment={name}", "-o", "name")
    return found.split()


def wait_gone(kube: Kubectl, name: str, say: Say) -> float:
    """Return the seconds until nothing of a deleted custom resource is left on the cluster."""
    return wait_until(f"nothing of {name}", lambda: ", ".join(list_children(kube, name)) or None, GONE_S, say)


def add_binaries_to_path() -> None:
    """Put the programs that `cluster/setup` built before all others of this process's PATH, if they are there."""
    folders = sorted(
        (cache_folder(os.environ) / "cluster").glob("bin-*/.complete"), key=lambda mark: mark.stat().st_mtime
    )
    if folders:
        os.environ["PATH"] = f"{folders[-1].parent}{os.pathsep}{os.environ['PATH']}"


def remove(target: Target, names: tuple[str, ...], say: Say) -> None:
    """Delete the custom resources, the chart, its CRD and its namespace."""
    for name in names:
        target.kube.run("delete", "emoe", name, "--ignore-not-found")
        wait_gone(target.kube, name, say)
    target.kube.helm("uninstall", RELEASE, f"--namespace={SYSTEM_NAMESPACE}", "--ignore-not-found")
    target.kube.run("delete", "namespace", SYSTEM_NAMESPACE, "--ignore-not-found")
    target.kube.run("delete", "crd", "elasticmoedeployments.elasticmoe.io", "--ignore-not-found")


def need_programs(*names: str) -> None:
    """Raise ClusterFailed for a program that is not on PATH."""
    for name in names:
        if shutil.which(name) is None:
            raise ClusterFailed(f"need {name} on PATH, there is none; cluster/setup builds it")
