"""The local CPU images: what their archives say, and what runs in them as their user."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticmoe.runtime.cli.main import main
from elasticmoe.runtime.contract.labels import RUN_AS_USER
from tests.engine.sizes import arena_bytes
from tests.images.built import WRITABLE, Built, Container, container_of, list_built
from tests.images.containerfiles import NAMES

BUILT = list_built()
GENERATE = Path(__file__).with_name("generate.py")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("buildah") is None or not all(one.archive.exists() for one in BUILT.values()),
        reason="needs buildah and what images/build leaves",
    ),
]


@pytest.fixture(scope="module")
def containers() -> Iterator[dict[str, Container]]:
    """A container of each of the three images."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(container_of(BUILT[name])) for name in NAMES}


@pytest.mark.parametrize("built", BUILT.values(), ids=BUILT)
def test_an_archive_names_its_image(built: Built) -> None:
    """What imports the archive gets the reference that manifests name."""
    (entry,) = built.read_index()["manifests"]
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == built.reference


@pytest.mark.parametrize("name", NAMES)
def test_an_archive_is_the_image_that_the_tests_below_run(name: str) -> None:
    """The archive was written after the last build."""
    manifest = BUILT[name].read_blob(BUILT[name].read_index()["manifests"][0]["digest"])
    with container_of(BUILT[name]) as container:
        inspect = ["buildah", "inspect", container.id]
        found = json.loads(subprocess.run(inspect, env=container.env, capture_output=True, check=True).stdout)
    assert manifest["config"]["digest"] == f"sha256:{found['FromImageID']}"


@pytest.mark.parametrize("name", NAMES)
def test_an_image_starts_as_the_user_that_pods_run_as(name: str) -> None:
    """A numeric user passes runAsNonRoot, and the labels say which version it is."""
    config = BUILT[name].read_config()["config"]
    assert config["User"] == f"{RUN_AS_USER}:{RUN_AS_USER}"
    assert config["Labels"]["org.opencontainers.image.version"] == BUILT[name].reference.rpartition(":")[2]


@pytest.mark.parametrize("name", NAMES)
def test_the_user_has_a_name_and_a_home(name: str, containers: dict[str, Container]) -> None:
    """The name is what kopf asks for, and caches go to the home."""
    ask = "import os, pwd; user = pwd.getpwuid(os.getuid()); print(user[0], user[2], user[5], os.environ['HOME'])"
    assert containers[name].run("python3", "-c", ask).split() == [
        "elasticmoe",
        str(RUN_AS_USER),
        "/scratch",
        "/scratch",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_user_writes_where_pods_can_and_nowhere_else(name: str, containers: dict[str, Container]) -> None:
    """The root is read-only in a pod; what needs to be written elsewhere would fail there."""
    for folder in WRITABLE:
        containers[name].run("python3", "-c", f"open('{folder}/x', 'w').close()")
    containers[name].run("sh", "-c", "! touch /x && ! touch /etc/x && ! touch /usr/local/x")


@pytest.mark.parametrize("name", ["coordinator", "runtime"])
def test_the_command_is_on_path(name: str, containers: dict[str, Container]) -> None:
    """Pods start `elasticmoe coordinator` and `elasticmoe serve`."""
    assert "coordinator" in containers[name].run("elasticmoe", "--help")
    assert "--socket" in containers[name].run("elasticmoe", "coordinator", "--help")


def test_the_operator_loads_its_handlers(containers: dict[str, Container]) -> None:
    """Starting kopf works in its image, by the chart's command."""
    containers["operator"].run("python3", "-c", "import kopf, elasticmoe.operator.handlers")
    assert "--liveness" in containers["operator"].run("python3", "-m", "kopf", "run", "--help")


def test_the_coordinator_has_no_torch(containers: dict[str, Container]) -> None:
    """A coordinator only copies bytes: an image a tenth of the size of the runtime's is enough."""
    ask = "import importlib.util as u; print([name for name in ('torch', 'vllm', 'kopf') if u.find_spec(name)])"
    assert containers["coordinator"].run("python3", "-c", ask).strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_compiled_when_it_starts(name: str, containers: dict[str, Container]) -> None:
    """A start without bytecode takes forty seconds longer, and none can be written in a pod."""
    ask = (
        "import importlib.util as u, os, sys, elasticmoe.runtime.cli.main;"
        "files = [m.__file__ for m in list(sys.modules.values()) if str(getattr(m, '__file__', '')).endswith('.py')];"
        "print(len(files), [f for f in files if not os.path.exists(u.cache_from_source(f))])"
    )
    num_files, missing = containers[name].run("python3", "-c", ask).split(maxsplit=1)
    assert int(num_files) > 50
    assert missing.strip() == "[]"


def test_the_runtime_generates_what_the_checkout_does(containers: dict[str, Container], tmp_path: Path) -> None:
    """A real vLLM without CUDA's packages: the same greedy tokens, nothing written outside of the folders of a pod."""
    assert main(["make-model", "tiny", str(tmp_path / "tiny")]) == 0
    arena = str(arena_bytes(tmp_path / "tiny", 16, 40))
    own = subprocess.run(
        [sys.executable, GENERATE, tmp_path / "tiny", arena],
        env=os.environ | {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    mounts = (f"--volume={tmp_path / 'tiny'}:/models/checkpoint:ro", f"--volume={GENERATE}:/generate.py:ro")
    there = containers["runtime"].run("python3", "/generate.py", "/models/checkpoint", arena, flags=mounts)
    tokens = json.loads(there.splitlines()[-1])
    assert len(tokens) == 16
    assert tokens == json.loads(own.splitlines()[-1])
    assert containers["runtime"].list_written() == []
