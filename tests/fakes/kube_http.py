"""A fake API server over HTTP around FakeKube: what the real dynamic client and the real kopf ask of one.

Discovery, get, list, watch, server-side apply, merge patch, create. No authentication, no validation, no controllers.
"""

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import yaml
from kubernetes.client.exceptions import ApiException

from tests.fakes.kube_api import FakeKind, FakeKube, Object

KINDS: Final = {
    "v1": {
        "pods": "Pod",
        "services": "Service",
        "serviceaccounts": "ServiceAccount",
        "nodes": "Node",
        "events": "Event",
        "namespaces": "Namespace",
    },
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
    "apps/v1": {"deployments": "Deployment", "daemonsets": "DaemonSet"},
    "elasticmoe.io/v1alpha1": {
        "elasticmoedeployments": "ElasticMoEDeployment",
        "elasticmoedeployments/status": "ElasticMoEDeployment",
    },
}
CLUSTER_WIDE: Final = {"Node", "Namespace", "CustomResourceDefinition"}
VERBS: Final = ["create", "get", "list", "patch", "watch"]


@dataclass(frozen=True)
class Place:
    """What a path names."""

    kind: FakeKind
    namespace: str | None
    name: str | None


def find_place(path: str) -> Place:
    """Return what a resource's path names; raises ApiException for one that is not here."""
    parts = path.strip("/").split("/")
    version, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
    namespace = None
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, part = (*rest, None, None)[:3] if rest else ("", None, None)
    kind = KINDS.get(version, {}).get(plural or "")
    if kind is None:
        raise ApiException(status=404, reason=f"no {path} here")
    return Place(FakeKind(version, kind, part), namespace, name)


def discover(path: str) -> Object | None:
    """Return what discovery says at a path, None if that is none of its."""
    groups = [version for version in KINDS if "/" in version]
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "groups": [_group(version) for version in groups]}
    version = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
    if version in KINDS:
        resources = [_resource(plural, kind) for plural, kind in KINDS[version].items()]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return None


def _group(version: str) -> Object:
    either = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [either], "preferredVersion": either}


def _resource(plural: str, kind: str) -> Object:
    return {"name": plural, "singularName": "", "namespaced": kind not in CLUSTER_WIDE, "kind": kind, "verbs": VERBS}


class FakeServer(ThreadingHTTPServer):
    """Serves a FakeKube; `alive` ends the watches."""

    daemon_threads = True

    def __init__(self, kube: FakeKube) -> None:
        """Listen on a free port of 127.0.0.1."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.kube = kube
        self.lock = threading.RLock()
        self.is_alive = True


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: FakeServer

    def do_GET(self) -> None:
        """Discovery, an object, a list or a watch."""
        url, query = self._parse()
        if (found := discover(url)) is not None:
            self._answer(found)
        elif query.get("watch") in ("true", "True"):
            self._watch(find_place(url), int(query["resourceVersion"]))
        else:
            self._do(lambda place: self._read(place, query.get("labelSelector", "")))

    def do_PATCH(self) -> None:
        """Server-side apply or a merge patch."""
        _, query = self._parse()
        content_type, body = self.headers["Content-Type"], self._body()
        self._do(lambda place: self._patch(place, content_type, body, query))

    def do_POST(self) -> None:
        """An Event."""
        body = self._body()
        self._do(lambda place: self._create(place, body))

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def _read(self, place: Place, selector: str) -> Object:
        found = self.server.kube.get(place.kind, place.name, place.namespace, selector).to_dict()
        if place.name is not None:
            return found
        version = {"resourceVersion": str(self.server.kube.version)}
        return {"kind": f"{place.kind.kind}List", "apiVersion": place.kind.api_version, "metadata": version, **found}

    def _patch(self, place: Place, content_type: str, body: Object, query: dict[str, str]) -> Object:
        assert place.name is not None
        kube = self.server.kube
        if content_type == "application/apply-patch+yaml":
            kube.server_side_apply(
                place.kind,
                body=body,
                name=place.name,
                namespace=place.namespace,
                field_manager=query["fieldManager"],
                force_conflicts=query["force"] in ("true", "True"),
            )
        else:
            assert place.namespace is not None
            kube.patch(place.kind, body, place.name, place.namespace, content_type=content_type)
        return kube.find(place.kind.kind, place.name, place.namespace)

    def _create(self, place: Place, body: Object) -> Object:
        assert place.namespace is not None
        self.server.kube.create(place.kind, body, place.namespace)
        return body

    def _watch(self, place: Place, since: int) -> None:
        """Send what has changed since a version, and what changes until the server ends."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        with self.server.lock:
            events = self.server.kube.watch(place.kind.kind, since)
        while self.server.is_alive:
            try:
                event = events.get(timeout=0.1)
            except queue.Empty:
                continue
            self.wfile.write(json.dumps(event).encode() + b"\n")
            self.wfile.flush()

    def _do(self, act: Any) -> None:  # noqa: ANN401 -- a function from a Place to JSON
        try:
            with self.server.lock:
                answer = json.dumps(act(find_place(self._parse()[0])))
        except ApiException as error:
            self._answer({"kind": "Status", "code": error.status, "message": error.reason}, error.status)
        else:
            self._send(answer, 200)

    def _answer(self, content: Object, status: int = 200) -> None:
        self._send(json.dumps(content), status)

    def _send(self, text: str, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _parse(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        return url.path.rstrip("/"), dict(parse_qsl(url.query))

    def _body(self) -> Object:
        body: Object = yaml.safe_load(self.rfile.read(int(self.headers["Content-Length"])))
        return body


@contextmanager
def serve(kube: FakeKube, kubeconfig: Path) -> Iterator[FakeServer]:
    """Serve the objects, and write a kubeconfig that leads to them."""
    with FakeServer(kube) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "fake", "user": {"token": "none"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": "default"}}],
            "current-context": "fake",
        }
        kubeconfig.write_text(json.dumps(config), encoding="utf-8")
        try:
            yield server
        finally:
            server.is_alive = False
            server.shutdown()
            thread.join()
