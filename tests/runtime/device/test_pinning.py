"""Pinning goes on beside what else starts; CUDA is not here, so what is called of it is written down instead."""

from threading import Event, Thread, current_thread

import pytest
import torch

from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.pinning import Pinning
from elasticmoe.runtime.hostpool.layout import HostLayout

DEVICE = torch.device("cuda", 1)


class _Pool(HostPool):
    """A pool that is pinned when the test says so."""

    def __init__(self, ends: int | Exception) -> None:
        super().__init__(HostLayout(num_layers=1, num_experts=2, rows=4, cols=8, itemsize=4), torch.float32)
        self.may_end = Event()
        self.pinned_by: Thread | None = None
        self._ends = ends

    def pin(self) -> int:
        self.pinned_by = current_thread()
        assert self.may_end.wait(60)
        if isinstance(self._ends, Exception):
            raise self._ends
        return self._ends


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[Thread, torch.device]:
    """Return the device that each thread chose."""
    devices = dict[Thread, torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.update({current_thread(): device}))
    return devices


def test_it_goes_on_beside_the_caller(chosen: dict[Thread, torch.device]) -> None:
    """In a thread that has chosen the worker's device, not the first one, and doesn't keep a process that ends."""
    pool = _Pool(0)
    pinning = Pinning(pool, DEVICE)
    pool.may_end.set()  # the caller went on while the pool wasn't pinned
    assert pinning.wait().error == 0
    assert pool.pinned_by is not None
    assert pool.pinned_by.daemon
    assert chosen == {pool.pinned_by: DEVICE}
    assert current_thread() not in chosen


@pytest.mark.usefixtures("chosen")
def test_how_it_ended_is_told() -> None:
    """CUDA's code, and the seconds it took; twice the same."""
    pool = _Pool(2)
    pool.may_end.set()
    pinning = Pinning(pool, DEVICE)
    assert pinning.wait() == pinning.wait()
    assert pinning.wait().error == 2
    assert pinning.wait().seconds > 0


@pytest.mark.usefixtures("chosen")
def test_what_it_raises_whoever_waits_gets() -> None:
    """A fault in a thread isn't lost, and nobody waits for ever."""
    pool = _Pool(RuntimeError("no driver"))
    pool.may_end.set()
    with pytest.raises(RuntimeError, match="no driver"):
        Pinning(pool, DEVICE).wait()
