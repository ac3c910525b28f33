"""The images that images/build left: their archives, and containers of them."""

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticmoe.runtime.contract.labels import RUN_AS_USER
from tests.images.containerfiles import IMAGES

WRITABLE = ("/scratch", "/tmp", "/dev/shm")  # noqa: S108 -- what pods mount, see elasticmoe.operator.builders.pod


@dataclass(frozen=True, slots=True)
class Built:
    """One image's name, reference and archive."""

    name: str
    reference: str
    archive: Path

    def read_blob(self, digest: str) -> dict[str, Any]:
        """Return the JSON of one of the archive's blobs."""
        return self._read(f"blobs/{digest.replace(':', '/')}")

    def read_index(self) -> dict[str, Any]:
        """Return the archive's list of images."""
        return self._read("index.json")

    def read_config(self) -> dict[str, Any]:
        """Return how a container of this image starts."""
        manifest = self.read_blob(self.read_index()["manifests"][0]["digest"])
        return self.read_blob(manifest["config"]["digest"])

    def _read(self, path: str) -> dict[str, Any]:
        with tarfile.open(self.archive) as archive:
            file = archive.extractfile(path)
            assert file is not None, f"{self.archive} has no {path}"
            content: dict[str, Any] = json.load(file)
        return content


@dataclass(frozen=True, slots=True)
class Container:
    """A container that runs commands as the image's user; the host's network and processes are visible in it."""

    id: str
    root: Path
    env: Mapping[str, str]

    def run(self, *command: str, flags: tuple[str, ...] = ()) -> str:
        """Return what a command printed, or fail with all that it said."""
        isolated = ["buildah", "run", "--isolation=chroot", *flags, self.id, "--", *command]
        done = subprocess.run(isolated, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def list_written(self) -> list[str]:
        """Return what the image's user has written outside of the folders that pods can write to."""
        layer = self.root.parent / "diff"
        mine = (path for path in layer.rglob("*") if path.lstat().st_uid == RUN_AS_USER)
        paths = sorted(f"/{path.relative_to(layer)}" for path in mine)
        return [path for path in paths if not path.startswith(WRITABLE)]


def list_built() -> dict[str, Built]:
    """Return what images/build makes, by name, whether it is there or not."""
    listed = subprocess.run([IMAGES / "build", "--print-refs"], capture_output=True, text=True, check=True).stdout
    built = [Built(name, reference, Path(archive)) for name, reference, archive in map(str.split, listed.splitlines())]
    return {one.name: one for one in built}


@contextmanager
def container_of(built: Built) -> Iterator[Container]:
    """Give a container of an image; it is removed at the end."""
    store = built.archive.parent / "buildah"
    env = os.environ | {
        "CONTAINERS_STORAGE_CONF": str(store / "storage.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(store / "registries.conf"),
    }

    def buildah(*words: str | Path) -> str:
        return subprocess.run(["buildah", *words], env=env, capture_output=True, text=True, check=True).stdout.strip()

    container = buildah("from", "--pull-never", f"--signature-policy={store / 'policy.json'}", built.reference)
    try:
        yield Container(container, Path(buildah("mount", container)), env)
    finally:
        buildah("rm", container)
