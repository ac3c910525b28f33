"""A fake of the API server behind the official dynamic client: only what the operator calls of it.

Server-side apply is a merge of objects, without field managers; nothing is defaulted or validated, no controller runs.
What it answers to a real client is left to the tests on a real cluster.
"""

import copy
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kubernetes.client.exceptions import ApiException

Object = dict[str, Any]


@dataclass(frozen=True)
class FakeKind:
    """A kind, or with `part` its subresource."""

    api_version: str
    kind: str
    part: str | None = None

    @property
    def subresources(self) -> dict[str, "FakeKind"]:
        """The status, as discovery finds it."""
        return {"status": FakeKind(self.api_version, self.kind, "status")}


@dataclass(frozen=True)
class FakeInstance:
    """What the dynamic client wraps answers in."""

    content: Object

    def to_dict(self) -> Object:
        """The answer as JSON."""
        return self.content


@dataclass
class FakeKube:
    """Objects by kind, namespace and name; every change is written down in `calls`."""

    objects: dict[tuple[str, str | None, str], Object] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    events: list[Object] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    """HTTP statuses to answer changes of a kind with."""
    body: str | None = None
    """What to say then."""
    on_status: Callable[[], None] = lambda: None
    version: int = 0
    watchers: list[tuple[str, "queue.Queue[Object]"]] = field(default_factory=list)
    told: list[Object] = field(default_factory=list)
    """Every change so far, as watchers hear of it."""

    @property
    def resources(self) -> SimpleNamespace:
        """Discovery."""
        return SimpleNamespace(get=FakeKind)

    def add(self, obj: Object) -> None:
        """Have an object in the cluster, and tell those who watch its kind if that is a change."""
        metadata = obj["metadata"]
        key = (obj["kind"], metadata.get("namespace"), metadata["name"])
        if obj == self.objects.get(key):
            return
        is_new = key not in self.objects
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        metadata.setdefault("uid", f"uid-{self.version}")
        self.objects[key] = obj
        self._tell("ADDED" if is_new else "MODIFIED", obj)

    def watch(self, kind: str, since: int) -> "queue.Queue[Object]":
        """Return where changes of a kind come, first those after the version that a list had."""
        events: queue.Queue[Object] = queue.Queue()
        for event in self.told:
            if event["object"]["kind"] == kind and int(event["object"]["metadata"]["resourceVersion"]) > since:
                events.put(event)
        self.watchers.append((kind, events))
        return events

    def _tell(self, what: str, obj: Object) -> None:
        event = {"type": what, "object": copy.deepcopy(obj)}
        self.told.append(event)
        for kind, events in self.watchers:
            if kind == obj["kind"]:
                events.put(event)

    def find(self, kind: str, name: str, namespace: str | None = "default") -> Object:
        """Return an object that must be there."""
        return self.objects[kind, namespace, name]

    def get(
        self,
        kind: FakeKind,
        name: str | None = None,
        namespace: str | None = None,
        label_selector: str = "",
        _request_timeout: float = 0.0,
    ) -> FakeInstance:
        """Return one object or a list."""
        if name is not None:
            return FakeInstance(self._existing(kind, name, namespace))
        wanted = dict(pair.split("=") for pair in label_selector.split(",") if pair)
        return FakeInstance({"items": [o for o in self._of(kind, namespace) if _has_labels(o, wanted)]})

    def server_side_apply(self, kind: FakeKind, **call: Any) -> FakeInstance:  # noqa: ANN401 -- the client's keywords
        """Merge the body into the object, or create it; a child's changed spec counts its generation up."""
        assert call["field_manager"] == "elasticmoe-operator"
        assert call["force_conflicts"] is True
        name, namespace, body = call["name"], call["namespace"], call["body"]
        is_trial = call.get("dry_run") == "All"
        self._record("try" if is_trial else "apply", kind, name)
        if kind.part:
            self.add({**self._existing(kind, name, namespace), kind.part: dict(body[kind.part])})
            self.on_status()
            return FakeInstance(self._existing(kind, name, namespace))
        former = self.objects.get((kind.kind, namespace, name), {})
        merged = _merge(former, body)
        generation = former.get("metadata", {}).get("generation", 0)
        merged["metadata"]["generation"] = generation + (merged.get("spec") != former.get("spec"))
        if is_trial:
            return FakeInstance(merged)
        self.add(merged)
        return FakeInstance(self._existing(kind, name, namespace))

    def patch(self, kind: FakeKind, body: Object, name: str, namespace: str, **call: Any) -> None:  # noqa: ANN401 -- as above
        """Merge the body into an object that is there; null removes a key."""
        assert call["content_type"] == "application/merge-patch+json"
        self._record("patch", kind, name)
        self.add(_without_null(_merge(self._existing(kind, name, namespace), body)))

    def create(self, kind: FakeKind, body: Object, namespace: str, _request_timeout: float = 0.0) -> None:
        """Take an Event."""
        assert kind.kind == "Event"
        assert body["metadata"]["namespace"] == namespace
        self.events.append(body)

    def _of(self, kind: FakeKind, namespace: str | None) -> list[Object]:
        found = [(key, obj) for key, obj in self.objects.items() if key[0] == kind.kind]
        return [obj for key, obj in found if namespace is None or key[1] == namespace]

    def _existing(self, kind: FakeKind, name: str, namespace: str | None) -> Object:
        try:
            return self.objects[kind.kind, namespace, name]
        except KeyError:
            raise ApiException(status=404, reason=f"{kind.kind} {name} is not there") from None

    def _record(self, verb: str, kind: FakeKind, name: str) -> None:
        self.calls.append((verb, f"{kind.kind}/{kind.part}" if kind.part else kind.kind, name))
        if kind.kind in self.failing:
            raise ApiException(status=self.failing[kind.kind], reason="as the test wants", body=self.body)


def _has_labels(obj: Object, wanted: Mapping[str, str]) -> bool:
    labels = obj["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in wanted.items())


def _without_null(obj: Object) -> Object:
    kept = {key: value for key, value in obj.items() if value is not None}
    return {key: _without_null(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _merge(old: Object, new: Object) -> Object:
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(old.get(key), dict)
        merged[key] = _merge(old[key], value) if both else copy.deepcopy(value)
    return merged
