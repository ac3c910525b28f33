"""The tiny model that the demo and the benches serve, made once per version of its maker and kept in a cache folder."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.serving.errors import BenchError
from bench.serving.meta import ROOT
from bench.serving.server import ELASTICMOE

MAKER_FILES = ("runtime/elasticmoe/runtime/cli/make_model.py", "runtime/elasticmoe/runtime/cli/models/*.py")
MAKE_TIMEOUT_S = 300


def cache_folder(environ: Mapping[str, str]) -> Path:
    """$ELASTICMOE_CACHE, or a folder in the user's cache."""
    return Path(environ.get("ELASTICMOE_CACHE") or Path.home() / ".cache" / "elasticmoe")


def hash_files(files: list[Path]) -> str:
    """A short digest of the files' names and contents."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def ensure_tiny_model(say: Callable[[str], None]) -> Path:
    """The tiny model's folder; made now if the cache has none of this maker's version."""
    maker = hash_files([file for pattern in MAKER_FILES for file in ROOT.glob(pattern)])
    folder = cache_folder(os.environ) / "models" / maker / "tiny"
    if folder.exists():
        say(f"The tiny model is in {folder}")
    else:
        say(f"Making the tiny model in {folder}")
        _make(folder)
    return folder


def _make(folder: Path) -> None:
    """Make it beside its place and move it there whole, so that a broken-off run leaves no half model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        command = [sys.executable, *ELASTICMOE, "make-model", "tiny", str(beside / "tiny")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise BenchError(
                f"wanted the tiny model, its maker ended with code {done.returncode}: {done.stderr[-2000:]}"
            )
        (beside / "tiny").rename(folder)
    finally:
        shutil.rmtree(beside)
