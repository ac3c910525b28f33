"""From a custom resource to an ElasticMoESpec; what can't be is a SpecError that names the field."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from elasticmoe.operator.errors import SpecError
from elasticmoe.operator.spec.model import ElasticMoESpec
from elasticmoe.runtime.contract.labels import COMPONENT_LABEL, DEPLOYMENT_LABEL, LIMIT_ANNOTATION

OWN_FLAGS: Final = {
    "--elastic-arena-bytes": "memory.arena",
    "--elastic-limit": "memory.expertOffload.limit",
    "--elastic-limit-file": "memory.expertOffload.limit",
    "--elastic-policy": "memory.expertOffload.policy",
    "--elastic-tpot-ms": "slo.tpotMilliseconds",
    "--elastic-ttft-ms": "slo.ttftMilliseconds",
    "--elastic-transport": "coordinator.mode",
    "--elastic-socket": "coordinator.mode",
    "--served-model-name": "model.servedName",
    "--shutdown-timeout": "termination.shutdownTimeoutSeconds",
    "--tensor-parallel-size": "parallelism.tensor",
    "-tp": "parallelism.tensor",
    "--host": "the operator, always 0.0.0.0",
    "--port": "the operator, always 8000",
}
"""Flags that the operator sets, and the field that says what to."""

_NAMES: Final = ("name", "mountPath")
"""What entries of a pod template's lists are merged by."""


def parse_spec(spec: Mapping[str, Any]) -> ElasticMoESpec:
    """Return the spec of a custom resource; raises SpecError for its first wrong field."""
    try:
        parsed = ElasticMoESpec.model_validate(spec)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(("spec", *map(str, first["loc"])))
        raise SpecError(field, _explain(first["type"], first["msg"], first["input"])) from error
    if parsed.model.uri.startswith("hf://"):
        problem = "the coordinator reads a folder; download the model into a claim and name that as pvc://CLAIM/FOLDER"
        raise SpecError("spec.model.uri", problem)
    _check_engine_args(parsed.engine_args)
    _check_pod_template(parsed.pod_template)
    return parsed


def _explain(kind: str, text: str, value: object) -> str:
    if kind == "extra_forbidden":
        return "there is no such field; `kubectl explain emoe.spec --recursive` lists them"
    if kind == "missing":
        return "is required"
    text = text.removeprefix("Value error, ")
    return text if isinstance(value, Mapping) or "it is" in text else f"{text}; it is {value!r}"


def _check_engine_args(args: Sequence[str]) -> None:
    for n, arg in enumerate(args):
        flag = arg.partition("=")[0].replace("_", "-")
        if flag in OWN_FLAGS:
            raise SpecError(f"spec.engineArgs.{n}", f"{flag} is set by {OWN_FLAGS[flag]}; remove it here")


def _check_pod_template(template: Mapping[str, Any]) -> None:
    """Refuse what would break selectors or roll pods with every limit, and lists that can't be merged by name."""
    metadata = _mapping(template, "metadata", "spec.podTemplate")
    spec = _mapping(template, "spec", "spec.podTemplate")
    if unknown := sorted(set(template) - {"metadata", "spec"}):
        raise SpecError(f"spec.podTemplate.{unknown[0]}", "a pod template has metadata and spec only")
    for label in (DEPLOYMENT_LABEL, COMPONENT_LABEL):
        if label in _mapping(metadata, "labels", "spec.podTemplate.metadata"):
            raise SpecError("spec.podTemplate.metadata.labels", f"{label} is the operator's own; remove it")
    if LIMIT_ANNOTATION in _mapping(metadata, "annotations", "spec.podTemplate.metadata"):
        problem = f"{LIMIT_ANNOTATION} belongs to live pods; set spec.memory.expertOffload.limit"
        raise SpecError("spec.podTemplate.metadata.annotations", problem)
    for field in ("containers", "initContainers", "volumes"):
        _check_named(spec.get(field, []), f"spec.podTemplate.spec.{field}")
    _check_names(spec, "spec.podTemplate.spec")


def _mapping(parent: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = parent.get(key) or {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}.{key}", f"want an object, it is {value!r}")
    return value


def _check_named(items: object, where: str) -> None:
    is_named = isinstance(items, list) and all(isinstance(item, Mapping) and item.get("name") for item in items)
    if not is_named:
        raise SpecError(where, "want a list of objects with a name each: they are merged by it")


def _check_names(value: object, where: str) -> None:
    """Refuse a name, at any depth, that nothing can be merged by: an object or a list."""
    if isinstance(value, list):
        for n, item in enumerate(value):
            _check_names(item, f"{where}.{n}")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key in _NAMES and isinstance(part, Mapping | list):
                raise SpecError(f"{where}.{key}", f"want a string, it is {part!r}")
            _check_names(part, f"{where}.{key}")
