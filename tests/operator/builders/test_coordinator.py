"""The coordinator's DaemonSet, field by field where the golden files don't vary."""

from typing import Any

from elasticmoe.operator.builders.coordinator import build_coordinator_daemonset, coordinator_bytes
from tests.fakes.kube_objects import IDENTITY, IMAGES, make_spec


def build(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 -- any field
    """Return the pod's spec for a spec with such fields."""
    built: dict[str, Any] = build_coordinator_daemonset(IDENTITY, make_spec(**fields), IMAGES)["spec"]["template"]
    found: dict[str, Any] = built["spec"]
    return found


def test_memory_is_requested_and_limited_to_pool_and_headroom() -> None:
    """The pool's pages are charged to the process that fills it."""
    memory = {"hostPool": {"size": "3Gi", "headroom": "512Mi"}}
    (main,) = build(memory=memory, coordinator={"resources": {"limits": {"cpu": "2"}}})["containers"]
    need = str(3 * 2**30 + 2**29)
    assert main["resources"] == {"requests": {"cpu": "100m", "memory": need}, "limits": {"cpu": "2", "memory": need}}
    assert str(coordinator_bytes(make_spec(memory=memory))) == need


def test_it_needs_no_gpu_and_no_privilege() -> None:
    """Neither host namespaces; root only to hand the socket's folder over."""
    pod = build()
    (main,), (owner,) = pod["containers"], pod["initContainers"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in main["env"]
    assert "nvidia.com/gpu" not in main["resources"]["limits"]
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert owner["command"][-2:] == ["/run/elasticmoe/default/tiny", "10001"]


def test_it_runs_where_workers_may() -> None:
    """Node selector and tolerations are the workers' own."""
    pod = build(nodeSelector={"a": "b"}, tolerations=[{"key": "t", "operator": "Exists"}])
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"a": "b"}, [{"key": "t", "operator": "Exists"}])


def test_the_spec_may_name_the_image() -> None:
    """Else it is the operator's; the init container has the same."""
    pod = build(coordinator={"image": {"repository": "mine", "tag": "2"}})
    assert [c["image"] for c in (*pod["containers"], *pod["initContainers"])] == ["mine:2", "mine:2"]
    assert build()["containers"][0]["image"] == "coordinator:1"


def test_what_a_failed_container_said_last_is_in_the_pods_status() -> None:
    """So that a condition can tell it."""
    pod = build()
    policies = [c["terminationMessagePolicy"] for c in (*pod["containers"], *pod["initContainers"])]
    assert policies == ["FallbackToLogsOnError"] * 2
