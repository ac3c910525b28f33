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
            "status": {**_status(), "description": "What the operator found and did; it is rebuilt at each pass."},
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
    autotuner = "what the autotuner remembers: its limit, and in history its last changes, each with its reason"
    return _object(
        {
            "observedGeneration": _integer("the spec's generation that this status is about"),
            "replicas": _integer("workers that there are"),
            "readyReplicas": _integer("workers that answer"),
            "updatedReplicas": _integer("workers of the newest pod template"),
            "availableReplicas": _integer("workers that the Deployment calls available"),
            "offloadLimit": _integer("experts of a layer that workers were told they may offload; none: their own"),
            "expertsPerLayer": _integer("experts of a layer, as workers told; kept while none does"),
            "countedModel": _text("URI of the model that expertsPerLayer is of"),
            "selector": _text("labels of the workers, for autoscalers"),
            "url": _text("where the model is served inside the cluster"),
            "conditions": _list_by("type", _condition(), "what holds now and since when"),
            "coordinators": _list_by("nodeName", _coordinator(), "the coordinators, by node"),
            "pods": _list_by("name", _pod(), "the workers, by pod"),
            "autotuner": {**ANY_OBJECT, "description": autotuner},
        }
    )


def _condition() -> dict[str, Any]:
    since = "since when the condition has its status"
    return {
        "type": _text("Ready, ConfigValid, CoordinatorsReady or HostMemoryFit"),
        "reason": _text("why, in one word"),
        "message": _text("why, with numbers and what to do"),
        "status": _text("whether it holds", enum=["True", "False", "Unknown"]),
        "observedGeneration": _integer("the spec's generation that it was judged for"),
        "lastTransitionTime": _text(since, format="date-time"),
    }


def _coordinator() -> dict[str, Any]:
    return {
        "nodeName": _text("its node"),
        "podName": _text("its pod"),
        "ready": _flag("whether it answers"),
        "poolBytes": _integer("bytes that its host pool holds", format="int64"),
        "leases": _integer("workers that hold its pool"),
    }


def _pod() -> dict[str, Any]:
    return {
        "name": _text("its pod"),
        "ready": _flag("whether it answers"),
        "requestedLimit": _integer("experts of a layer that it was told it may offload"),
        "effectiveLimit": _integer("experts of a layer that it may offload"),
        "residentExperts": _integer("experts, over all layers, whose weights are on its GPU"),
    }


def _text(description: str, **rules: Any) -> dict[str, Any]:  # noqa: ANN401 -- any keyword of a schema
    return {"type": "string", "description": description, **rules}


def _integer(description: str, **rules: Any) -> dict[str, Any]:  # noqa: ANN401 -- as above
    return {"type": "integer", "description": description, **rules}


def _flag(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _list_by(key: str, properties: dict[str, Any], description: str) -> dict[str, Any]:
    """Return a list whose entries are known by one of their fields, as server-side apply merges them."""
    return {
        "type": "array",
        "description": description,
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
