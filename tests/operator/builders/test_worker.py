"""The workers' Deployment, field by field where the golden files don't vary."""

from typing import Any

from elasticmoe.operator.builders.worker import build_worker_deployment
from elasticmoe.operator.spec.parse import OWN_FLAGS
from tests.fakes.kube_objects import IDENTITY, IMAGES, make_spec, offload


def build(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 -- any field
    """Return the Deployment's spec for a spec with such fields."""
    built: dict[str, Any] = build_worker_deployment(IDENTITY, make_spec(**fields), IMAGES)["spec"]
    return built


def main(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 -- any field
    """Return its container."""
    (container,) = build(**fields)["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def value_of(args: list[str], flag: str) -> str:
    """Return what stands after a flag."""
    return args[args.index(flag) + 1]


def test_each_tensor_rank_asks_for_one_gpu() -> None:
    """If the spec names no resources."""
    assert main(parallelism={"tensor": 4})["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def test_named_resources_are_all_there_is() -> None:
    """Without a GPU among them no GPU is seen, whatever the image's environment says."""
    container = main(resources={"requests": {"cpu": "1"}})
    assert container["resources"] == {"requests": {"cpu": "1"}, "limits": {}}
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
    assert "NVIDIA_VISIBLE_DEVICES" not in [item["name"] for item in main()["env"]]


def test_the_users_environment_wins() -> None:
    """Also over the operator's own."""
    env = main(env=[{"name": "HOME", "value": "/x"}, {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "f"}}}])[
        "env"
    ]
    assert [item for item in env if item["name"] == "HOME"] == [{"name": "HOME", "value": "/x"}]
    assert {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "f"}}} in env


def test_no_limit_is_in_the_pod_template() -> None:
    """A limit of the spec must not roll pods; it comes by annotation through the downward API's folder."""
    assert build(memory=offload(limit=7)) == build(memory=offload(limit=8)) == build()
    container = main()
    assert value_of(container["args"], "--elastic-limit-file") == "/etc/elasticmoe/podinfo/expert-offload-limit"
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "podinfo"]
    assert (mount["mountPath"], "subPath" in mount) == ("/etc/elasticmoe/podinfo", False)
    (volume,) = [volume for volume in build()["template"]["spec"]["volumes"] if volume["name"] == "podinfo"]
    (item,) = volume["downwardAPI"]["items"]
    assert item["fieldRef"]["fieldPath"] == "metadata.annotations['elasticmoe.io/expert-offload-limit']"


def test_the_arena_is_given_in_bytes_or_left_to_the_runtime() -> None:
    """1Gi are 1073741824."""
    memory = {"arena": "1Gi", "hostPool": {"size": "1Gi"}}
    assert value_of(main(memory=memory)["args"], "--elastic-arena-bytes") == str(2**30)
    assert "--elastic-arena-bytes" not in main()["args"]


def test_the_promised_time_per_token_reaches_the_policy() -> None:
    """Where nothing is promised the runtime's default stands."""
    assert value_of(main(slo={"tpotMilliseconds": 50})["args"], "--elastic-tpot-ms") == "50"
    assert "--elastic-tpot-ms" not in main()["args"]


def test_the_promised_time_to_the_first_token_reaches_the_policy() -> None:
    """Where none is promised none is given."""
    assert value_of(main(slo={"ttftMilliseconds": 800})["args"], "--elastic-ttft-ms") == "800"
    assert "--elastic-ttft-ms" not in main(slo={"tpotMilliseconds": 50})["args"]


def test_a_flag_that_the_operator_sets_is_refused_in_engine_args() -> None:
    """Each of them, whatever the spec: two of one kind would leave it to chance which counts."""
    args = main(
        slo={"tpotMilliseconds": 50, "ttftMilliseconds": 800}, memory={"arena": "1Gi", "hostPool": {"size": "1Gi"}}
    )["args"]
    assert {word for word in args if word.startswith("--")} <= OWN_FLAGS.keys()


def test_the_model_is_served_under_the_resources_name_or_its_own() -> None:
    """And the user's flags come last."""
    args = main(model={"uri": "pvc://c", "servedName": "qwen"}, engineArgs=["--seed", "1"])["args"]
    assert value_of(args, "--served-model-name") == "qwen"
    assert args[-2:] == ["--seed", "1"]
    assert value_of(main()["args"], "--served-model-name") == "tiny"


def test_what_a_failed_worker_said_last_is_in_the_pods_status() -> None:
    """So that a condition can tell it."""
    assert main()["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_the_socket_is_the_coordinators() -> None:
    """In a folder of the node that only this resource's pods share."""
    assert value_of(main()["args"], "--elastic-socket") == "/run/elasticmoe/default/tiny/pool.sock"


def test_a_start_may_take_the_whole_budget() -> None:
    """Rounded up to whole probes."""
    probe = main(probes={"startupBudgetSeconds": 95})["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 96


def test_no_drain_has_no_pre_stop() -> None:
    """Kubernetes refuses a sleep of nothing."""
    assert main()["lifecycle"] == {"preStop": {"sleep": {"seconds": 15}}}
    assert "lifecycle" not in main(termination={"drainSeconds": 0})


def test_the_spec_may_name_the_image() -> None:
    """Else it is the operator's."""
    named = main(image={"repository": "mine", "tag": "2", "pullPolicy": "Never"})
    assert (named["image"], named["imagePullPolicy"]) == ("mine:2", "Never")
    assert main()["image"] == "runtime:1"


def test_the_pod_template_is_merged_in_by_name() -> None:
    """Its container main is ours; others are added; labels that select pods stay."""
    mine = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"priorityClassName": "high", "containers": [{"name": "main", "tty": True}, {"name": "side"}]},
    }
    template = build(podTemplate=mine)["template"]
    ours, side = template["spec"]["containers"]
    assert (ours["tty"], ours["image"], side) == (True, "runtime:1", {"name": "side"})
    assert template["spec"]["priorityClassName"] == "high"
    labels = template["metadata"]["labels"]
    assert (labels["team"], labels["elasticmoe.io/deployment"]) == ("a", "tiny")
