"""The Containerfiles: what holds for each of the three images, without building one."""

import re

import pytest

from elasticmoe.operator.builders.pod import HOME
from elasticmoe.runtime.contract.labels import RUN_AS_USER
from tests.images.containerfiles import NAMES, read_containerfile, rests


@pytest.mark.parametrize("name", NAMES)
def test_the_base_is_an_argument(name: str) -> None:
    """The base's default is named whole, with its registry and a tag, and can be replaced."""
    first, second = read_containerfile(name)[:2]
    assert (first.word, second) == ("ARG", ("FROM", "${BASE}"))
    assert re.fullmatch(r"BASE=docker\.io/[a-z-]+/[a-z-]+:\w[\w.-]+", first.rest)


@pytest.mark.parametrize("name", NAMES)
def test_the_image_runs_as_the_user_that_pods_run_as(name: str) -> None:
    """The last USER is that number, which runAsNonRoot can check, and passwd and group know it."""
    assert rests(name, "USER")[-1] == f"{RUN_AS_USER}:{RUN_AS_USER}"
    steps = " ".join(rests(name, "RUN"))
    assert f"groupadd --gid {RUN_AS_USER} " in steps
    assert f"useradd --uid {RUN_AS_USER} --gid {RUN_AS_USER} --home-dir {HOME} " in steps


@pytest.mark.parametrize("name", NAMES)
def test_home_is_where_pods_may_write(name: str) -> None:
    """Caches go to HOME, and all but a few folders is read-only."""
    assert f"HOME={HOME}" in " ".join(rests(name, "ENV")).split()


@pytest.mark.parametrize("name", NAMES)
def test_no_step_asks_a_network(name: str) -> None:
    """Packages come from the context: pip has no index, and nothing else fetches."""
    steps = rests(name, "RUN")
    installs = [step for step in steps if "pip install" in step]
    assert installs
    assert all("--no-index" in step for step in installs)
    assert not re.search(r"\b(apt|apt-get|curl|wget|git)\b|https?:", " ".join(steps))
    assert rests(name, "ADD") == []


@pytest.mark.parametrize("name", NAMES)
def test_the_labels_tell_title_version_and_licence(name: str) -> None:
    """The labels are those of the OCI's annotations; the version is the build's argument."""
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', " ".join(rests(name, "LABEL"))))
    assert labels == {"title": f"elasticmoe-{name}", "version": "${VERSION}", "licenses": "Apache-2.0"}


def test_the_runtime_keeps_its_bases_packages() -> None:
    """The base of vLLM pins what it was built with, so only our wheel is installed."""
    install = next(step for step in rests("runtime", "RUN") if "pip install" in step)
    assert "--no-deps" in install
