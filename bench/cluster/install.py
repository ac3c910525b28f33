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
CRD = ROOT / "crds" / "elasticmoe.io_elasticmoedeployments.yaml"
MARK = {"elasticmoe.io/made-by": "demo"}
MODEL_MARK = ".made-by-the-demo"
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
    kube = find_cluster(environ)
    return Target(kube, is_ours=kube.kubeconfig is not None, images=find_images(environ))


def find_cluster(environ: Mapping[str, str]) -> Kubectl:
    """Return the way to the cluster; only our own has a kubeconfig that we name."""
    wanted = environ.get("CLUSTER", "")
    if wanted == "existing":
        return Kubectl()
    if wanted:
        raise ClusterFailed(f"want CLUSTER=existing or no CLUSTER at all, it is {wanted!r}")
    kubeconfig = cache_folder(environ) / "cluster" / "run" / "admin.conf"
    if not kubeconfig.exists():
        raise ClusterFailed(f"need a running cluster, there is no {kubeconfig}; run cluster/up")
    return Kubectl(str(kubeconfig))


def find_images(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the references of what `images/build` made; for another IMAGE_PREFIX, the chart's own version there."""
    refs, prefix = Path(environ.get("IMAGES") or cache_folder(environ) / "images") / "refs", environ.get("IMAGE_PREFIX")
    if refs.exists():
        built = dict(line.split()[:2] for line in refs.read_text(encoding="utf-8").splitlines())
        if prefix is None or built["runtime"].startswith(f"{prefix}elasticmoe-"):
            return built
    if prefix is None:
        raise ClusterFailed(f"need images, there is no {refs}; run images/build or name a registry's by IMAGE_PREFIX")
    return {name: f"{prefix}elasticmoe-{name}:{VERSION}" for name in ("operator", "coordinator", "runtime")}


def install_chart(target: Target, say: Say) -> None:
    """Install the operator, or upgrade it, and wait until it runs."""
    _take_namespace(target.kube)
    say(f"Installing the chart into {SYSTEM_NAMESPACE}")
    # Helm never updates a CRD that is there.
    target.kube.run("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    keys = {"operator": "image", "runtime": "runtimeImage", "coordinator": "coordinatorImage"}
    flags = []
    for name, key in keys.items():
        repository, _, tag = target.images[name].rpartition(":")
        flags += [f"--set={key}.repository={repository}", f"--set={key}.tag={tag}"]
    target.kube.helm("upgrade", "--install", RELEASE, str(CHART), f"--namespace={SYSTEM_NAMESPACE}", *flags)
    system = Kubectl(target.kube.kubeconfig, SYSTEM_NAMESPACE)
    wait_until("the operator", lambda: _operator_state(system), INSTALL_S, say)


def _take_namespace(kube: Kubectl) -> None:
    """Make the operator's namespace with our mark; one without it is somebody's own install, which we leave alone."""
    found = kube.get("namespace", SYSTEM_NAMESPACE)
    if found is not None and not _is_marked(found):
        raise ClusterFailed(
            f"want a namespace {SYSTEM_NAMESPACE} for the demo, there is one of another's: use another cluster"
        )
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM_NAMESPACE, "labels": MARK}})


def _is_marked(obj: Object) -> bool:
    return MARK.items() <= (obj["metadata"].get("labels") or {}).items()


def _operator_state(system: Kubectl) -> str | None:
    (deployment,) = system.find("deployment", f"app.kubernetes.io/instance={RELEASE}")
    status = deployment.get("status", {})
    is_seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    is_ready = is_seen and status.get("readyReplicas") == status.get("updatedReplicas") == 1 == status.get("replicas")
    return None if is_ready else show_condition(find_condition(deployment, "Available"))


def put_model(target: Target, preset: str, say: Say) -> None:
    """Write a test model to the node's disk, by a Job of the runtime's image; a model that is there stays."""
    say(f"Making the model {preset} on the node, in {MODELS_ON_NODE}/{preset}")
    folder = f"/models/{preset}"
    make = f"elasticmoe make-model {preset} {folder} --force && touch {folder}/{MODEL_MARK}"
    # A model that was there gets no mark, so cluster/down keeps it.
    run_on_models(target, f"make-{preset}-model", f"[ -e {folder}/config.json ] || {{ {make}; }}", say)


def run_on_models(target: Target, name: str, script: str, say: Say) -> None:
    """Run a shell script by a Job `name` of the runtime's image, with the node's models in /models."""
    target.kube.run("delete", "job", name, "--ignore-not-found")
    target.kube.apply(_models_job(target, name, script))
    wait_until(f"the job {name}", lambda: _job_state(target.kube, name), JOB_S, say)
    target.kube.run("delete", "job", name)


def _models_job(target: Target, name: str, script: str) -> Object:
    """Return the Job; it runs as root because the node's folder is root's."""
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
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": MARK}, "spec": spec}


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


def remove(kube: Kubectl, names: tuple[str, ...], say: Say) -> None:
    """Delete what the demo made: custom resources, jobs, the chart and its namespace; the CRD if nobody uses it."""
    namespace = kube.get("namespace", SYSTEM_NAMESPACE)
    if namespace is None or not _is_marked(namespace):
        say(f"No namespace {SYSTEM_NAMESPACE} of the demo's is there: nothing to remove")
        return
    kube.run("delete", "job", "-l", f"{next(iter(MARK))}=demo", "--ignore-not-found")
    for name in names:
        kube.run("delete", "emoe", name, "--ignore-not-found")
        wait_gone(kube, name, say)
    kube.helm("uninstall", RELEASE, f"--namespace={SYSTEM_NAMESPACE}", "--ignore-not-found")
    kube.run("delete", "namespace", SYSTEM_NAMESPACE)
    if not kube.run("get", "emoe", "--all-namespaces", "-o", "name").strip():
        kube.run("delete", "-f", str(CRD))


def need_programs(*names: str) -> None:
    """Raise ClusterFailed for a program that is not on PATH."""
    for name in names:
        if shutil.which(name) is None:
            raise ClusterFailed(f"need {name} on PATH, there is none; cluster/setup builds it")
