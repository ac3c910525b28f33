"""The only place that changes the cluster: server-side apply through the official dynamic client; and what it observes.

Every call blocks, so the loop runs it in a thread. API errors of a kind that a later pass may not meet are not caught.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient

from elasticmoe.operator.builders.names import MANAGER, Manifest, child_name
from elasticmoe.operator.desired import blame
from elasticmoe.operator.errors import ForeignObjectError, RefusedObjectError
from elasticmoe.operator.observed import Identity, Node, Object, Observed, Pod, parse_node, parse_pods
from elasticmoe.operator.spec.model import ElasticMoESpec
from elasticmoe.runtime.contract.labels import (
    COORDINATOR,
    DEPLOYMENT_LABEL,
    GROUP,
    KIND,
    LIMIT_ANNOTATION,
    VERSION,
    WORKER,
)

API_VERSION: Final = f"{GROUP}/{VERSION}"
_NOT_FOUND: Final = 404
_INVALID: Final = (400, 422)
_UNTYPED: Final = "failed to create typed patch object"
"""In an answer 500: how server-side apply tells of a field that the kind doesn't have, of another type, or twice."""
_MERGE_PATCH: Final = "application/merge-patch+json"
_BOUNDED: Final = {"_request_timeout": 10}
"""A server that has stopped to answer must not hold a resource's pass for ever."""
_TRIAL: Final = {"dry_run": "All"}
_SERVER_SIDE: Final = {"field_manager": MANAGER, "force_conflicts": True, **_BOUNDED}


class Cluster:
    """One API server, as the operator uses it."""

    def __init__(self, client: DynamicClient) -> None:
        self._client = client

    def list_resources(self, namespace: str | None) -> list[Object]:
        """Return all our custom resources, of one namespace or of the cluster."""
        return self._list(API_VERSION, KIND, namespace=namespace)

    def find_resource(self, name: str, namespace: str) -> Object | None:
        """Return a custom resource, None if it is gone."""
        return self._find(API_VERSION, KIND, name, namespace)

    def observe(self, resource: Object, spec: ElasticMoESpec | None) -> Observed:
        """Return what there is of a custom resource; its nodes only if a valid spec says which."""
        identity = identify(resource)
        label, where = f"{DEPLOYMENT_LABEL}={identity.name}", identity.namespace
        workers, coordinators = parse_pods(self._list("v1", "Pod", namespace=where, label_selector=label))
        return Observed(
            identity=identity,
            is_leaving="deletionTimestamp" in resource["metadata"],
            previous_status=resource.get("status") or {},
            worker_deployment=self._child("Deployment", WORKER, identity),
            coordinator_daemonset=self._child("DaemonSet", COORDINATOR, identity),
            workers=workers,
            coordinators=coordinators,
            nodes=() if spec is None else self._nodes(spec),
        )

    def apply(self, manifest: Manifest, *, is_trial: bool = False) -> Object:
        """Make the object what the manifest says; returns it as the API server has it now, or would have it in a trial.

        Raises ForeignObjectError if it has another owner, RefusedObjectError if the API server finds it invalid.
        """
        metadata = manifest["metadata"]
        owner = metadata["ownerReferences"][0]["uid"]
        present = self._find(manifest["apiVersion"], manifest["kind"], metadata["name"], metadata["namespace"])
        if present is not None and owner not in _owners(present):
            message = (
                f"need {manifest['kind']} {metadata['name']} in {metadata['namespace']}, another has it; "
                "rename or delete it, or rename this resource"
            )
            raise ForeignObjectError(message)
        kind = self._kind(manifest["apiVersion"], manifest["kind"])
        where = {"name": metadata["name"], "namespace": metadata["namespace"], **(_TRIAL if is_trial else {})}
        try:
            applied: Object = self._client.server_side_apply(kind, body=manifest, **where, **_SERVER_SIDE).to_dict()
        except ApiException as error:
            if error.status not in _INVALID and _UNTYPED not in str(error.body):
                raise
            raise _refusal(manifest, _message(error)) from error
        return applied

    def set_limit(self, pod: Pod, namespace: str, limit: int | None) -> None:
        """Annotate a live pod with its offload limit, None takes it away; one that has gone meanwhile needs none."""
        body = {"metadata": {"annotations": {LIMIT_ANNOTATION: None if limit is None else str(limit)}}}
        kind = self._kind("v1", "Pod")
        try:
            self._client.patch(
                kind, body=body, name=pod.name, namespace=namespace, content_type=_MERGE_PATCH, **_BOUNDED
            )
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise

    def write_status(self, identity: Identity, status: Mapping[str, Any]) -> None:
        """Replace the status of a custom resource; one that has gone meanwhile needs none."""
        metadata = {"name": identity.name, "namespace": identity.namespace}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
        subresource = self._kind(API_VERSION, KIND).subresources["status"]
        try:
            self._client.server_side_apply(subresource, body=body, **metadata, **_SERVER_SIDE)
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise

    def post_event(self, manifest: Manifest) -> None:
        """Create an Event."""
        kind = self._kind("v1", "Event")
        self._client.create(kind, body=manifest, namespace=manifest["metadata"]["namespace"], **_BOUNDED)

    def _child(self, kind: str, component: str, identity: Identity) -> Object | None:
        """Return a child; what has its name and another owner is none, whatever it looks like."""
        found = self._find("apps/v1", kind, child_name(identity, component), identity.namespace)
        return None if found is None or identity.uid not in _owners(found) else found

    def _nodes(self, spec: ElasticMoESpec) -> tuple[Node, ...]:
        """Return the nodes that coordinators are placed on, by name."""
        label = ",".join(f"{key}={value}" for key, value in sorted(spec.node_selector.items()))
        nodes = (parse_node(obj) for obj in self._list("v1", "Node", label_selector=label))
        return tuple(sorted((node for node in nodes if node.takes(spec.tolerations)), key=lambda node: node.name))

    def _kind(self, api_version: str, kind: str) -> Any:  # noqa: ANN401 -- the client has no types
        return self._client.resources.get(api_version=api_version, kind=kind)

    def _list(self, api_version: str, kind: str, **where: str | None) -> list[Object]:
        found = self._client.get(self._kind(api_version, kind), **where, **_BOUNDED).to_dict()
        items: list[Object] = found["items"]
        return items

    def _find(self, api_version: str, kind: str, name: str, namespace: str) -> Object | None:
        try:
            found: Object = self._client.get(
                self._kind(api_version, kind), name=name, namespace=namespace, **_BOUNDED
            ).to_dict()
        except ApiException as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        return found


def identify(resource: Object) -> Identity:
    """Return who a custom resource is."""
    metadata = resource["metadata"]
    return Identity(metadata["name"], metadata["namespace"], metadata["uid"], metadata.get("generation", 1))


def _message(error: ApiException) -> str:
    """Return what the API server says of an error, in its own words."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _refusal(manifest: Manifest, message: str) -> RefusedObjectError:
    """Return what is wrong with the spec of an object that the API server refused."""
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    field = blame(kind, message)
    where = " or in spec.podTemplate" if kind == "Deployment" and not field.startswith("spec.podTemplate") else ""
    return RefusedObjectError(field, f"the API server refuses {kind} {name}: {message}; mend it here{where}")


def _owners(obj: Object) -> set[str]:
    return {owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()}
