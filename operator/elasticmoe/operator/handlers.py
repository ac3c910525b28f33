"""kopf's way in: `kopf run -m elasticmoe.operator.handlers`. Handlers wake the loop; they decide nothing.

No timer, daemon or delete handler: each would put a finalizer on the resources, which then outlives the operator.
"""

import asyncio
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import kopf
from kubernetes import config
from kubernetes.client import ApiClient
from kubernetes.dynamic import DynamicClient

from elasticmoe.operator.apply import Cluster
from elasticmoe.operator.loop import MAX_WATCH_AGE_S, Listed, Loop, WatchAge
from elasticmoe.operator.reconcile import Key, Readings, Reconciler
from elasticmoe.operator.scrape import scrape_all
from elasticmoe.operator.settings import read_settings
from elasticmoe.runtime.contract.labels import DEPLOYMENT_LABEL, GROUP, PLURAL, VERSION

OURS: Final = {DEPLOYMENT_LABEL: kopf.PRESENT}


@dataclass(slots=True)
class Running:
    """What one run of the operator has; kopf's memo carries it to the handlers."""

    loop: Loop
    watch: WatchAge
    task: "asyncio.Task[None]"


def connect() -> DynamicClient:
    """Return a client with the pod's own identity, or outside a cluster with the user's."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return DynamicClient(ApiClient())


def start(cluster: Cluster) -> Running:
    """Start the loop over a cluster, with the settings of the environment."""
    settings = read_settings(os.environ)
    reconciler = Reconciler(cluster, scrape_all, settings.images, Readings())

    def list_all() -> Listed:
        found = [resource["metadata"] for resource in cluster.list_resources(settings.namespace)]
        keys = tuple(Key(metadata["namespace"], metadata["name"]) for metadata in found)
        return Listed(keys, {metadata["uid"]: metadata["resourceVersion"] for metadata in found})

    watch = WatchAge(time.monotonic())
    loop = Loop(lambda key: reconciler.reconcile(key, datetime.now(UTC)), list_all, watch)
    return Running(loop, watch, asyncio.create_task(loop.run(time.monotonic)))


def configure(settings: kopf.OperatorSettings) -> None:
    """Set what kopf leaves open: a watch that can't go silent unnoticed, annotations of our own, no peering."""
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.watching.server_timeout = 120
    settings.watching.client_timeout = 150
    settings.watching.connect_timeout = 5
    settings.watching.inactivity_timeout = 70
    settings.networking.request_timeout = 10
    settings.queueing.worker_limit = 16
    settings.peering.standalone = True
    settings.scanning.disabled = bool(read_settings(os.environ).namespace)


@kopf.on.startup()
async def begin(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:  # noqa: ANN401 -- kopf's
    """Connect, and start the loop's own task."""
    configure(settings)
    client = await asyncio.to_thread(connect)
    memo.running = start(Cluster(client))


@kopf.on.cleanup()
async def end(memo: Any, **_: Any) -> None:  # noqa: ANN401 -- kopf's
    """Stop the loop's task; a pass that has begun ends in its thread."""
    running = getattr(memo, "running", None)  # none after a start that failed
    if running is not None:
        running.task.cancel()


@kopf.on.probe(id="watch_age_s")
async def check_watch(memo: Any, **_: Any) -> float:  # noqa: ANN401 -- kopf's
    """Return seconds since the watch was last in step; too many fail the probe, so that the pod is started anew."""
    age_s: float = time.monotonic() - memo.running.watch.agreed_at_s
    if age_s > MAX_WATCH_AGE_S:
        message = f"want the watch in step within {MAX_WATCH_AGE_S:.0f} s, it was {age_s:.0f} s ago; start anew"
        raise kopf.PermanentError(message)
    return age_s


@kopf.on.create(GROUP, VERSION, PLURAL)
@kopf.on.update(GROUP, VERSION, PLURAL)
@kopf.on.resume(GROUP, VERSION, PLURAL)
async def wake_for_resource(name: str, namespace: str | None, memo: Any, **_: Any) -> None:  # noqa: ANN401 -- kopf's
    """A resource came or changed."""
    assert namespace, "the resource is a namespaced one"
    await memo.running.loop.wake(Key(namespace, name))


@kopf.on.event(GROUP, VERSION, PLURAL)
async def see_resource(event: Any, memo: Any, **_: Any) -> None:  # noqa: ANN401 -- kopf's
    """The watch brought a version of a resource."""
    metadata = event["object"]["metadata"]
    if event["type"] == "DELETED":
        memo.running.watch.forget(metadata["uid"])
    else:
        memo.running.watch.see(metadata["uid"], metadata["resourceVersion"], time.monotonic())


@kopf.on.event("apps", "v1", "deployments", labels=OURS)
@kopf.on.event("apps", "v1", "daemonsets", labels=OURS)
@kopf.on.event("v1", "pods", labels=OURS)
async def wake_for_child(labels: Any, namespace: str | None, memo: Any, **_: Any) -> None:  # noqa: ANN401 -- kopf's
    """A child came, changed or went."""
    assert namespace, "pods and what makes them are namespaced"
    await memo.running.loop.wake(Key(namespace, labels[DEPLOYMENT_LABEL]))
