"""The children of the examples: as the golden files say, and as Kubernetes' own schemas allow."""

from pathlib import Path

import kubernetes_validate
import pytest

from elasticmoe.operator.desired import build_desired
from tests.fakes.kube_objects import IDENTITY, IMAGES, make_spec
from tests.operator.write_golden import EXAMPLES, GOLDEN, build_example, dump

KUBERNETES = "1.34"


def test_there_are_examples() -> None:
    """And a golden file for each, and none for one that has gone."""
    assert {path.name for path in EXAMPLES} == {path.name for path in GOLDEN.glob("*.yaml")} != set()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_children_are_the_golden_ones(example: Path) -> None:
    """A difference rolls the pods of everyone who upgrades: look at it, then write the golden files anew."""
    assert dump(build_example(example)) == (GOLDEN / example.name).read_text(encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_kubernetes_knows_every_field_of_the_children(example: Path) -> None:
    """Checked against the strict OpenAPI schemas of the oldest release that we run on."""
    for manifest in build_example(example):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_workers_come_last() -> None:
    """Their account and their coordinators are there before them."""
    kinds = [manifest["kind"] for manifest in build_desired(IDENTITY, make_spec(), IMAGES)]
    assert kinds == ["ServiceAccount", "DaemonSet", "Service", "Deployment"]


def test_children_are_owned_labelled_and_in_the_resources_namespace() -> None:
    """So they go when it goes, and are found by one label."""
    for manifest in build_desired(IDENTITY, make_spec(), IMAGES):
        metadata = manifest["metadata"]
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("ElasticMoEDeployment", "tiny", "uid-1")
        assert metadata["labels"]["elasticmoe.io/deployment"] == "tiny"
        assert metadata["namespace"] == "default"
