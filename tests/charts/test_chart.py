"""The Helm chart: its values, what it asks to be allowed, and what it renders where there is a helm."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

CHART = Path(__file__).resolve().parent.parent.parent / "charts" / "elasticmoe"
HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm on PATH")


def read_values() -> dict[str, Any]:
    """The chart's default values."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return values


def read_schema() -> dict[str, Any]:
    """What values may be."""
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return schema


def read_rules() -> list[dict[str, Any]]:
    """Every rule of the chart's roles, whatever the values: each starts in a line of its own."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").iterdir())]
    blocks = [match for text in texts for match in re.findall(r"^- apiGroups:.*\n(?:  .+\n)+", text, re.MULTILINE)]
    return [rule for block in blocks for rule in yaml.safe_load(block)]


def render(*flags: str) -> list[dict[str, Any]]:
    """The manifests that helm renders, without the CRD."""
    done = subprocess.run(
        ["helm", "template", "release", CHART, "--namespace=ops", *flags], capture_output=True, text=True, check=True
    )
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def test_the_default_values_are_allowed_and_all_in_the_schema() -> None:
    """A value that nobody describes is a typing error."""
    jsonschema.validate(read_values(), read_schema())
    assert set(read_values()) | {"global"} == set(read_schema()["properties"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"imgae": {}},
        {"rbac": {"cluster": "yes"}},
        {"image": {"repository": "x", "pullPolicy": "Sometimes"}},
        {"runtimeImage": {"repository": "x", "digest": "sha1:0"}},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    """Before anything is installed."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**read_values(), **wrong}, read_schema())


def test_the_operator_may_read_no_secret() -> None:
    """Nor anything by a wildcard, nor hand rights on."""
    rules = read_rules()
    assert {"elasticmoedeployments", "deployments", "pods", "nodes"} <= {name for r in rules for name in r["resources"]}
    for rule in rules:
        assert not {"secrets", "*", "roles", "clusterroles"} & set(rule["resources"]), rule
        assert not {"*", "delete", "deletecollection", "escalate", "impersonate", "bind"} & set(rule["verbs"]), rule
        assert "*" not in rule["apiGroups"]


def test_every_rule_was_found() -> None:
    """What the tests above look at is all there is."""
    text = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    assert text.count("apiGroups:") == len(read_rules())


def test_one_version_for_chart_and_project() -> None:
    """The chart's default images have it as their tag."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = (CHART.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{chart["appVersion"]}"\n' in project
    assert chart["version"] == chart["appVersion"]


@needs_helm
@pytest.mark.parametrize("cluster", ["true", "false"])
def test_what_is_rendered_is_valid_and_may_do_the_same_in_both_modes(cluster: str) -> None:
    """In one namespace by a Role, else by a ClusterRole."""
    manifests = render(f"--set=rbac.cluster={cluster}")
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.34", strict=True)
    kinds = [manifest["kind"] for manifest in manifests]
    assert ("Role" in kinds) == (cluster == "false")
    allowed = {
        name for m in manifests if m["kind"] in ("Role", "ClusterRole") for r in m["rules"] for name in r["resources"]
    }
    assert {"elasticmoedeployments", "nodes", "pods"} <= allowed
    (deployment,) = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert ("--all-namespaces" in container["args"]) == (cluster == "true")


@needs_helm
def test_images_are_named_by_digest_or_by_the_charts_version() -> None:
    """A tag in between."""
    digest = "sha256:" + "0" * 64
    manifests = render("--set=image.tag=v7", f"--set=runtimeImage.digest={digest}")
    (deployment,) = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    assert container["image"] == "elasticmoe-operator:v7"
    assert env["ELASTICMOE_RUNTIME_IMAGE"] == f"elasticmoe-runtime@{digest}"
    assert env["ELASTICMOE_COORDINATOR_IMAGE"] == "elasticmoe-coordinator:0.1.0"


@needs_helm
def test_helm_lints_the_chart() -> None:
    """Warnings are failures."""
    done = subprocess.run(["helm", "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
