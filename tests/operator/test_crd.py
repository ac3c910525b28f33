"""The CRD: in step with the model, small, structural, and with the rules that one field alone can't say."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from elasticmoe.operator import crd
from elasticmoe.operator.crd import build_crd
from tests.fakes.kube_bench import Bench
from tests.fakes.kube_objects import make_pod_object, offload
from tests.operator.write_golden import EXAMPLES, ROOT

SHIPPED = ROOT / "crds" / "elasticmoe.io_elasticmoedeployments.yaml"
MAX_BYTES = 200_000


def root_schema() -> dict[str, Any]:
    """Return the schema of the resource."""
    schema: dict[str, Any] = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def walk(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every schema in a schema."""
    yield schema
    for part in schema.get("properties", {}).values():
        yield from walk(part)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key])


def test_the_shipped_crd_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m elasticmoe.operator.crd > crds/…` writes it anew."""
    runpy.run_path(crd.__file__, run_name="__main__")
    assert capsys.readouterr().out == SHIPPED.read_text(encoding="utf-8")


def test_the_chart_ships_the_same_file() -> None:
    """One file, by a link."""
    assert (ROOT / "charts" / "elasticmoe" / "crds" / SHIPPED.name).resolve() == SHIPPED


def test_it_is_small_enough_for_kubectl_apply() -> None:
    """262144 bytes fit into an annotation; half of that is left for the future."""
    assert SHIPPED.stat().st_size < MAX_BYTES


def test_kubernetes_knows_every_field_of_it() -> None:
    """Checked against the strict OpenAPI schema."""
    kubernetes_validate.validate(yaml.safe_load(SHIPPED.read_text(encoding="utf-8")), "1.34", strict=True)


def test_it_is_structural() -> None:
    """No references, no null, a type or int-or-string everywhere, properties never beside additionalProperties."""
    for schema in walk(root_schema()):
        assert not {"$ref", "$defs", "const", "oneOf", "allOf", "title", "exclusiveMinimum"} & set(schema)
        is_either = schema.get("x-kubernetes-int-or-string") is True
        assert ("type" in schema) != is_either, schema
        assert is_either or "anyOf" not in schema
        assert schema.get("type") != "null"
        assert not {"properties", "additionalProperties"} <= set(schema)
        assert schema.get("default", ...) is not None


def test_every_field_of_spec_and_status_is_described() -> None:
    """`kubectl explain` is the first page that a user opens."""
    parts = [part for name in ("spec", "status") for part in walk(root_schema()["properties"][name])]
    fields = [pair for part in parts for pair in part.get("properties", {}).items()]
    assert len(fields) > 80
    assert [name for name, field in fields if not field.get("description")] == []


def test_the_status_that_is_written_is_in_the_schema() -> None:
    """The server refuses to apply a field that is not."""
    bench = Bench(memory=offload(limit=20, max=5))
    bench.run()
    bench.kube.add(make_pod_object("c", "coordinator"))
    bench.serve()
    bench.run()
    status = bench.resource["status"]
    assert {"countedModel", "expertsPerLayer", "autotuner", "offloadLimit"} <= set(status)
    assert list(list_unknown(status, root_schema()["properties"]["status"], "status")) == []


def test_nested_defaults_are_reached() -> None:
    """The API server fills a field only where its parent is there, so each optional parent defaults to {}."""
    memory = root_schema()["properties"]["spec"]["properties"]["memory"]["properties"]
    assert memory["expertOffload"]["default"] == {}
    assert memory["expertOffload"]["properties"]["autotune"]["default"] == {}
    assert memory["expertOffload"]["properties"]["autotune"]["properties"]["enabled"]["default"] is True


def test_scale_has_its_three_paths() -> None:
    """`kubectl scale emoe` and an autoscaler need replicas in spec and status, and the selector as a string."""
    version = build_crd()["spec"]["versions"][0]
    scale = version["subresources"]["scale"]
    assert scale["labelSelectorPath"] == ".status.selector"
    properties = root_schema()["properties"]
    assert properties["spec"]["properties"]["replicas"]["default"] == 1
    assert properties["status"]["properties"]["selector"]["type"] == "string"
    assert properties["status"]["properties"]["replicas"]["type"] == "integer"


def test_rules_of_several_fields_are_cel() -> None:
    """The API server refuses before the operator sees it; it judges the default {} too, so fields are asked for."""
    rules = [rule["rule"] for schema in walk(root_schema()) for rule in schema.get("x-kubernetes-validations", ())]
    assert sorted(rules) == [
        (
            "!has(self.gracePeriodSeconds) || !has(self.drainSeconds) || !has(self.shutdownTimeoutSeconds) || "
            "self.gracePeriodSeconds >= self.drainSeconds + self.shutdownTimeoutSeconds"
        ),
        (
            "!has(self.min) || !has(self.max) || "
            "type(self.min) != int || type(self.max) != int || int(self.min) <= int(self.max)"
        ),
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "size(self.metadata.name) <= 40",
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_takes_the_examples(example: Path) -> None:
    """And each of their fields is in it: the server drops what is not."""
    resource = yaml.safe_load(example.read_text(encoding="utf-8"))
    jsonschema.validate(resource, root_schema())
    unknown = list(list_unknown(resource["spec"], root_schema()["properties"]["spec"]))
    assert unknown == []


def list_unknown(value: object, schema: dict[str, Any], path: str = "spec") -> Iterator[str]:
    """The fields of a value that its schema doesn't have."""
    if isinstance(value, dict) and "properties" in schema:
        for key, part in value.items():
            if key not in schema["properties"]:
                yield f"{path}.{key}"
            else:
                yield from list_unknown(part, schema["properties"][key], f"{path}.{key}")
    elif isinstance(value, list) and "items" in schema:
        for n, part in enumerate(value):
            yield from list_unknown(part, schema["items"], f"{path}.{n}")


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": "ftp://x"}, "memory": {"hostPool": {"size": "1Gi"}}},
        {"model": {"uri": "path:///x"}, "memory": {"hostPool": {}}},
        {"model": {"uri": "path:///x"}, "memory": {"hostPool": {"size": "1 Gi"}}},
        {"model": {"uri": "path:///x"}, "memory": {"hostPool": {"size": "1Gi"}, "expertOffload": {"limit": "1.5%"}}},
        {"model": {"uri": "path:///x"}, "memory": {"hostPool": {"size": "1Gi"}, "expertOffload": {"limit": -1}}},
    ],
)
def test_the_schema_refuses_what_one_field_says_wrong(spec: dict[str, Any]) -> None:
    """Before it is stored."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"spec": spec}, root_schema())
