"""Merges the user's pod template into ours: objects by key, lists of named things by name, all else replaced."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_BY_NAME: Final = frozenset({"containers", "initContainers", "volumes", "env", "imagePullSecrets", "ports"})
_BY_PATH: Final = frozenset({"volumeMounts"})


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ours with theirs on top; neither is changed."""
    merged = dict(ours)
    for key, value in theirs.items():
        merged[key] = _merge_value(key, ours.get(key), value)
    return merged


def _merge_value(key: str, ours: Any, theirs: Any) -> Any:  # noqa: ANN401 -- JSON
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return merge(ours, theirs)
    if isinstance(ours, Sequence) and isinstance(theirs, Sequence):
        if key in _BY_NAME:
            return _merge_list("name", ours, theirs)
        if key in _BY_PATH:
            return _merge_list("mountPath", ours, theirs)
    return theirs


def _merge_list(key: str, ours: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
    """Return ours in their order with theirs merged in by that key; what has no such key is added."""
    merged = {item[key]: item for item in ours}
    nameless = []
    for item in theirs:
        name = item.get(key) if isinstance(item, Mapping) else None
        if name is None:
            nameless.append(item)
        else:
            merged[name] = merge(merged.get(name, {}), item)
    return [*merged.values(), *nameless]
