"""From a custom resource to a spec; every refusal names its field."""

import pytest

from elasticmoe.operator.errors import SpecError
from elasticmoe.operator.spec.model import Image
from elasticmoe.operator.spec.parse import parse_spec
from tests.fakes.kube_objects import SPEC, Object, make_spec, offload


def test_the_least_spec_is_complete_with_defaults() -> None:
    """A model and a pool's size are enough."""
    spec = make_spec()
    assert (spec.replicas, spec.parallelism.tensor, spec.memory.expert_offload.policy) == (1, 1, "goodput")
    assert spec.memory.expert_offload.autotune.enabled
    assert spec.node_selector == {"nvidia.com/gpu.present": "true"}


def test_numbers_are_quantities_too() -> None:
    """As everywhere in Kubernetes."""
    assert make_spec(memory={"hostPool": {"size": 1024}}).memory.host_pool.size == "1024"


def test_a_limit_may_be_a_number_or_a_share() -> None:
    """Both stay as they were written: the status compares them."""
    assert make_spec(memory=offload(limit=12)).memory.expert_offload.limit == 12
    assert make_spec(memory=offload(limit="40%")).memory.expert_offload.limit == "40%"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {}}, r"^spec\.model\.uri: is required$"),
        ({"model": {"uri": "s3://x"}}, r"^spec\.model\.uri: .*it is 's3://x'$"),
        ({"model": {"uri": "hf://a/b"}}, r"^spec\.model\.uri: the coordinator reads a folder; .*pvc://"),
        ({"modelx": {}}, r"^spec\.modelx: there is no such field; `kubectl explain"),
        ({"replicas": -1}, r"^spec\.replicas: .*it is -1$"),
        ({"memory": {"hostPool": {"size": "1GiB"}}}, r"^spec\.memory\.hostPool\.size: want a quantity.*'1GiB'$"),
        ({"memory": {"hostPool": {"size": "9000P", "headroom": "300P"}}}, r"hostPool: size \+ headroom must be less"),
        ({"memory": {"hostPool": {"size": "10E"}}}, r"hostPool\.size: want a quantity.* less than 8Ei, it is '10E'$"),
        ({"memory": {"hostPool": {"size": True}}}, r"^spec\.memory\.hostPool\.size: want a whole number.*True$"),
        ({"memory": offload(limit="101%")}, r"^spec\.memory\.expertOffload\.limit: want experts of a layer"),
        ({"memory": offload(limit=-1)}, r"limit: want experts of a layer, .*it is -1$"),
        ({"memory": offload(limit=1.5)}, r"limit: want a whole number or a string, it is 1\.5$"),
        ({"memory": offload(min=9, max=8)}, r"expertOffload: min must not exceed max, they are 9 and 8$"),
        ({"memory": offload(min="9%", max="8%")}, r"min must not exceed max"),
        ({"memory": offload(limit="many")}, r"limit: want experts of a layer, .*it is 'many'$"),
        ({"memory": offload(limit="7")}, r"limit: want experts of a layer, .*it is '7'$"),
        ({"memory": offload(autotune={"interval": 15})}, r"autotune\.interval: want a duration.*it is 15$"),
        ({"memory": offload(autotune={"interval": "15"})}, r"autotune\.interval: want a duration"),
        ({"termination": {"gracePeriodSeconds": 30}}, r"^spec\.termination: gracePeriodSeconds must be at least 45"),
        (
            {"coordinator": {"resources": {"limits": {"memory": "1Gi"}}}},
            r"^spec\.coordinator: resources must not name memory",
        ),
        ({"engineArgs": ["-x", "--port=1"]}, r"^spec\.engineArgs\.1: --port is set by the operator"),
        ({"engineArgs": ["--served_model_name"]}, r"--served-model-name is set by model\.servedName"),
        ({"podTemplate": {"kind": "Pod"}}, r"^spec\.podTemplate\.kind: a pod template has metadata and spec only"),
        ({"podTemplate": {"spec": [1]}}, r"^spec\.podTemplate\.spec: want an object, it is \[1\]"),
        ({"podTemplate": {"spec": {"containers": [{}]}}}, r"^spec\.podTemplate\.spec\.containers: want a list"),
        (
            {"podTemplate": {"spec": {"containers": [{"name": {"a": "b"}}]}}},
            r"^spec\.podTemplate\.spec\.containers\.0\.name: want a string, it is {'a': 'b'}$",
        ),
        (
            {"podTemplate": {"spec": {"containers": [{"name": "main", "env": [{"name": ["a"]}]}]}}},
            r"^spec\.podTemplate\.spec\.containers\.0\.env\.0\.name: want a string, it is \['a'\]$",
        ),
        (
            {"podTemplate": {"spec": {"containers": [{"name": "main", "volumeMounts": [{"mountPath": {}}]}]}}},
            r"volumeMounts\.0\.mountPath: want a string, it is {}$",
        ),
        (
            {"podTemplate": {"spec": {"imagePullSecrets": [{"name": {}}]}}},
            r"^spec\.podTemplate\.spec\.imagePullSecrets\.0\.name: want a string",
        ),
        ({"podTemplate": {"spec": {"volumes": "x"}}}, r"^spec\.podTemplate\.spec\.volumes: want a list"),
        (
            {"podTemplate": {"metadata": {"labels": {"elasticmoe.io/deployment": "x"}}}},
            r"labels: elasticmoe\.io/deployment is the operator's own",
        ),
        (
            {"podTemplate": {"metadata": {"annotations": {"elasticmoe.io/expert-offload-limit": "1"}}}},
            r"annotations: .* belongs to live pods; set spec\.memory\.expertOffload\.limit",
        ),
    ],
)
def test_what_can_not_be_is_refused_with_its_field(fields: Object, message: str) -> None:
    """Field, what was wanted, what there was."""
    with pytest.raises(SpecError, match=message):
        parse_spec({**SPEC, **fields})


def test_a_duration_stays_as_it_was_written() -> None:
    """It is in seconds where it is used."""
    assert make_spec(memory=offload(autotune={"cooldown": "5m"})).memory.expert_offload.autotune.cooldown == "5m"


def test_min_and_max_of_different_kinds_are_not_compared() -> None:
    """A share is worth nothing before the experts are counted."""
    assert make_spec(memory=offload(min=9, max="8%")).memory.expert_offload.min == 9


def test_a_good_pod_template_is_kept_as_it_is() -> None:
    """Names are all that is asked of its lists."""
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": [{"name": "main", "tty": True}]}}
    assert make_spec(podTemplate=template).pod_template == template


def test_a_digest_wins_over_the_tag() -> None:
    """An image is named once."""
    digest = "sha256:" + "0" * 64
    assert Image(repository="r", tag="1").reference == "r:1"
    assert Image(repository="r", tag="1", digest=digest).reference == f"r@{digest}"
