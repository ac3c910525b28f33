"""The CRD, generated from the spec's model: `python -m elasticmoe.operator.crd > crds/elasticmoe.io_….yaml`.

pydantic's JSON schema is made structural, as the API server wants it: no references, no null, no additionalProperties
beside properties. Unknown fields are refused by the server's own strict validation (kubectl's default).
"""

import sys
from typing import Any, Final

import yaml

from elasticmoe.operator.spec.fields import ANY_OBJECT
from elasticmoe.operator.spec.model import ElasticMoESpec
from elasticmoe.runtime.contract.labels import GROUP, KIND, PLURAL, VERSION

MAX_NAME: Final = 40
_NAME_RULES: Final = [
    {"rule": f"size(self.metadata.name) <= {MAX_NAME}", "message": f"the name may have at most {MAX_NAME} characters"},
    {
        "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "message": "the name is also a Service's: a letter first, then letters, digits and dashes",
    },
]
_COLUMNS: Final = [
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Desired", "integer", ".spec.replicas", 0),
    ("Ready-Replicas", "integer", ".status.readyReplicas", 0),
    ("Offload-Limit", "integer", ".status.offloadLimit", 0),
    ("URL", "string", ".status.url", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Model", "string", ".spec.model.uri", 1),
]


def build_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["emoe"],
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [{"name": n, "type": t, "jsonPath": path, "priority": p} for n, t, path, p in _COLUMNS]
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": scale},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": _root()},
    }


def _root() -> dict[str, Any]:
    schema = ElasticMoESpec.model_json_schema(by_alias=True)
    return {
        "type": "object",
        "description": "A MoE model served by elasticmoe: workers, and on each node a pool of all experts.",
        "required": ["spec"],
        "x-kubernetes-validations": _NAME_RULES,
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(schema, schema.get("$defs", {})),
            "status": _status(),
        },
    }


def structural(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema of what pydantic describes; a nested object with defaults defaults to {}."""
    schema = _inlined(schema, defs)
    kept = {key: value for key, value in schema.items() if key not in ("title", "$defs", "properties", "items")}
    if "properties" in schema:
        kept.pop("additionalProperties", None)
        kept["properties"] = {name: structural(part, defs) for name, part in schema["properties"].items()}
        if "default" in kept:
            kept["default"] = {}
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = structural(schema["additionalProperties"], defs)
    if "items" in schema:
        kept["items"] = structural(schema["items"], defs)
    return kept


def _inlined(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its reference replaced, and without the null of an optional field."""
    schema = dict(schema)
    if {"type": "null"} in schema.get("anyOf", []):
        (schema_of_value,) = [choice for choice in schema.pop("anyOf") if choice != {"type": "null"}]
        schema.pop("default")
        schema = {**schema_of_value, **schema}
    if "$ref" in schema:
        schema = {**_inlined(defs[schema.pop("$ref").rsplit("/", 1)[1]], defs), **schema}
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    return schema


def _status() -> dict[str, Any]:
    integers = (
        "observedGeneration",
        "replicas",
        "readyReplicas",
        "updatedReplicas",
        "availableReplicas",
        "offloadLimit",
        "expertsPerLayer",
    )
    text, number, flag = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
    big = {"type": "integer", "format": "int64"}
    coordinator = {"nodeName": text, "podName": text, "ready": flag, "poolBytes": big, "leases": number}
    pod = {"name": text, "ready": flag, "requestedLimit": number, "effectiveLimit": number, "residentExperts": number}
    return _object(
        {
            **dict.fromkeys(integers, number),
            "selector": text,
            "url": text,
            "conditions": _list_by("type", _condition()),
            "coordinators": _list_by("nodeName", coordinator),
            "pods": _list_by("name", pod),
            "autotuner": ANY_OBJECT,
        }
    )


def _condition() -> dict[str, Any]:
    return {
        **{name: {"type": "string"} for name in ("type", "reason", "message")},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "observedGeneration": {"type": "integer"},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _list_by(key: str, properties: dict[str, Any]) -> dict[str, Any]:
    """Return a list whose entries are known by one of their fields, as server-side apply merges them."""
    return {
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
        "items": {**_object(properties), "required": [key]},
    }


class _Plain(yaml.SafeDumper):
    """Writes shared values out in full: the API server's YAML has no aliases to follow."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 -- yaml's signature
        return True


def dump_crd() -> str:
    """Return the CRD as the YAML file that is shipped."""
    head = "# Generated by `python -m elasticmoe.operator.crd`; change the spec's model instead.\n"
    return head + yaml.dump(build_crd(), Dumper=_Plain, sort_keys=False, width=120)


if __name__ == "__main__":
    sys.stdout.write(dump_crd())
