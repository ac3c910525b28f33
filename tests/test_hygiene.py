"""What no tracked file may hold, and what the README and the results must."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# In parts, so that this file passes its own test.
REGISTRY_HOSTS = (
    "pypi" + ".org",
    "python" + "hosted.org",
    "download.pytorch" + ".org",
    "deb.debian" + ".org",
    "registry.npmjs" + ".org",
    "crates" + ".io",
    "proxy.golang" + ".org",
    "repo.maven" + ".apache.org",
)
MACHINE_PATHS = ("/" + "root/", "/" + "home/", "/" + "tmp/", "/" + "work/", "/opt/" + "wheels")
NEWS_WIDTH = 130
RESULT_KEYS = ("packages", "commit", "time_utc")


def read_tracked() -> Iterator[tuple[str, str]]:
    """Name and text of each tracked file that is text."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (raw := path.read_bytes()):
            yield name, raw.decode("utf-8")


@pytest.mark.parametrize("needle", [*REGISTRY_HOSTS, *MACHINE_PATHS])
def test_no_tracked_file_names_a_registry_or_a_machine(needle: str) -> None:
    """A lock or a script that names a host or a path works on one machine only."""
    assert [name for name, text in read_tracked() if needle in text] == []


def test_readme_names_only_commands_that_exist() -> None:
    """Each `make TARGET` in the README is a target of the Makefile."""
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", (ROOT / "README.md").read_text(encoding="utf-8")))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named >= {"demo", "test"}
    assert named <= targets


def test_news_are_wrapped() -> None:
    """A fragment's lines are as long as the others': towncrier takes them over as they are."""
    fragments = sorted((ROOT / "newsfragments").glob("*.md"))
    long = [
        f"{path.name}:{number}: {len(line)} characters"
        for path in fragments
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > NEWS_WIDTH
    ]
    assert fragments
    assert long == []


def test_results_say_where_they_come_from() -> None:
    """A figure without its versions, hardware and commit can't be compared with another."""
    for path in sorted((ROOT / "bench" / "results").rglob("*.json")):
        meta = json.loads(path.read_text(encoding="utf-8"))["meta"]
        assert [key for key in RESULT_KEYS if not meta.get(key)] == [], path.name
        assert any(meta.get(key) for key in ("gpu", "cpu_model")), f"{path.name} names no hardware"
