"""One cluster for all tests here: the chart, the tiny model and the example's resource, as `make demo` leaves them."""

import os
from pathlib import Path

import pytest

from bench.cluster.install import (
    Target,
    add_binaries_to_path,
    find_target,
    install_chart,
    put_model,
    wait_taken_over,
)
from bench.cluster.kubectl import ClusterFailed
from tests.e2e.served import EXAMPLE, Served

CLUSTER_TIMEOUT_S = 600.0
NODE_MODEL = Path("/var/lib/elasticmoe/models/tiny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests on the cluster the time that pods take to start."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(CLUSTER_TIMEOUT_S))


@pytest.fixture(scope="session")
def target() -> Target:
    """Return the cluster that `cluster/up` started; without one there is nothing to test here."""
    add_binaries_to_path()
    try:
        found = find_target(os.environ)
        found.kube.run("get", "--raw", "/readyz")
    except ClusterFailed as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the cluster that `make demo` leaves: {error}")
    assert found.is_ours, "these tests look at the node itself: unset CLUSTER"
    return found


@pytest.fixture(scope="session")
def operator(target: Target) -> Target:
    """Return the cluster with the operator on it."""
    install_chart(target, print)
    return target


@pytest.fixture(scope="session")
def tiny(operator: Target) -> Served:
    """Return the example's resource, serving."""
    put_model(operator, "tiny", print)
    operator.kube.run("apply", "-f", str(EXAMPLE))
    wait_taken_over(operator, "tiny", print)
    served = Served(operator, "tiny")
    served.wait_ready()
    return served
