"""Pinning goes on beside what else starts; CUDA is not here, so what is called of it is written down instead."""

import multiprocessing
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest
import torch

from elasticmoe.runtime.contract.config import FetchKind, RuntimeConfig
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.pinning import Pinning, pageable_warning, worst_error
from elasticmoe.runtime.errors import ConfigError
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


@pytest.mark.parametrize(
    ("fetch", "costs"),
    [
        ("device", "the host drives the fetches, without CUDA graphs"),
        ("host", "copies are slower and hold up the host"),
    ],
)
def test_a_pool_that_is_not_pinned_is_served_with_one_warning(fetch: FetchKind, costs: str) -> None:
    """It names what was refused, what it costs and what to do; graphs are lost only where the device would drive."""
    config = RuntimeConfig(fetch="host" if fetch == "host" else None)
    warning = pageable_warning(3 * 2**30, 304, config, fetch)
    assert "pinning 3072.00 MiB of host memory was refused (cudaHostRegister: CUDA error 304)" in warning
    assert costs in warning
    assert ("graphs" in warning) == (fetch == "device")
    assert "`ulimit -l`" in warning
    assert "IPC_LOCK" in warning
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("config", "asks"),
    [
        (RuntimeConfig(fetch="device"), "fetch: device has the device read it, .* or leave fetch out"),
        (RuntimeConfig(lookahead=1), "lookahead has the device read it, .* or leave lookahead out"),
    ],
)
def test_what_only_a_device_can_do_is_refused_where_it_was_asked_for(config: RuntimeConfig, asks: str) -> None:
    """A device can't read pageable memory: nothing that was asked for is dropped, the sentence says what to leave."""
    with pytest.raises(ConfigError, match=rf"pinning 3072.00 MiB .* was refused .*, and {asks}.*host drives"):
        pageable_warning(3 * 2**30, 2, config, "device")


def _agree(rank: int, error: int, store: Path, have: Path) -> None:
    """Be one rank of two, whose pinning ended with `error`."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    assert group is not None
    have.write_text(str(worst_error(error, group)), encoding="ascii")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("errors", "want"), [((0, 2), "2"), ((0, 0), "0")])
def test_ranks_agree_on_whether_they_are_pinned(tmp_path: Path, errors: tuple[int, int], want: str) -> None:
    """One rank's refusal is every rank's: graphs are captured together or not at all."""
    spawn = multiprocessing.get_context("spawn")
    files = [tmp_path / str(rank) for rank in range(2)]
    ranks = [
        spawn.Process(target=_agree, args=(rank, error, tmp_path / "store", files[rank]))
        for rank, error in enumerate(errors)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [file.read_text(encoding="ascii") for file in files] == [want, want]
