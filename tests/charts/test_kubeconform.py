"""kubeconform over the rendered chart, the CRD and the examples, with Kubernetes' own schemas and the CRD's."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from bench.cluster.install import CHART
from bench.serving.meta import ROOT

CRD = ROOT / "crds" / "elasticmoe.io_elasticmoedeployments.yaml"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
KUBERNETES = "v1.34.0"
CRD_MAX_BYTES = 200_000
CHART_KINDS = (
    "clusterrole-rbac-v1",
    "clusterrolebinding-rbac-v1",
    "deployment-apps-v1",
    "role-rbac-v1",
    "rolebinding-rbac-v1",
    "serviceaccount-v1",
)

pytestmark = pytest.mark.skipif(
    not (shutil.which("kubeconform") and shutil.which("helm")), reason="needs what cluster/setup builds on PATH"
)


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return kubeconform's flags: where the schemas lie, with our own resource's made from the CRD."""
    folder = tmp_path_factory.mktemp("schemas")
    for kind in CHART_KINDS:
        (folder / f"{kind}.json").write_text(read_schema(kind))
    (version,) = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"]
    own = json.dumps(version["schema"]["openAPIV3Schema"])
    (folder / "elasticmoedeployment-elasticmoe-v1alpha1.json").write_text(own)
    return ["-schema-location", f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"]


def read_schema(kind: str) -> str:
    """Return Kubernetes' own schema of a kind, with what it refers to in a neighbouring file put into it."""
    spec = importlib.util.find_spec("kubernetes_validate")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "kubernetes-json-schema" / f"{KUBERNETES}-local-strict"
    schema, shared = (json.loads((folder / f"{name}.json").read_text()) for name in (kind, "_definitions"))
    text = json.dumps({key: schema[key] for key in schema if key != "$id"} | {"$defs": shared["$defs"]})
    return text.replace('"/api/_definitions.json#/', '"#/').replace('"_definitions.json#/', '"#/')


def check(schemas: list[str], text: str) -> subprocess.CompletedProcess[str]:
    """Run kubeconform, to which a kind without a schema is an error."""
    command = ["kubeconform", "-strict", "-summary", *schemas]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cluster", ["true", "false"])
def test_the_rendered_chart_conforms(schemas: list[str], cluster: str) -> None:
    """In both modes; the CRD is judged by the API server itself, in tests/e2e."""
    command = ["helm", "template", "release", str(CHART), f"--set=rbac.cluster={cluster}"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    done = check(schemas, rendered)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Invalid: 0, Errors: 0, Skipped: 0" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_conform(schemas: list[str], example: Path) -> None:
    """To the CRD's schema, and in nothing that it doesn't know."""
    done = check(schemas, example.read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid: 1, Invalid: 0" in done.stdout


def test_what_does_not_conform_is_told(schemas: list[str]) -> None:
    """Else the tests above would show nothing."""
    wrong = EXAMPLES[0].read_text(encoding="utf-8").replace("replicas: 1", "replicas: one")
    assert "Invalid: 1" in check(schemas, wrong).stdout
    unknown = yaml.safe_load(EXAMPLES[0].read_text(encoding="utf-8")) | {"kind": "Unknown"}
    assert check(schemas, yaml.safe_dump(unknown)).returncode == 1


def test_the_crd_can_be_applied_by_any_kubectl() -> None:
    """Client-side apply keeps a copy in an annotation of at most 262,144 bytes."""
    assert len(json.dumps(yaml.safe_load(CRD.read_text(encoding="utf-8")))) < CRD_MAX_BYTES
