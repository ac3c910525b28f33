"""Pinning goes on beside what else starts; CUDA is not here, so what is called of it is written down instead."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest
import torch

from elasticmoe.runtime.contract.config import FetchKind, RuntimeConfig
from elasticmoe.runtime.device import cudart
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.pinning import Pinned, Pinning, pageable_warning, wait_for_all
from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.hostpool.layout import HostLayout

DEVICE = torch.device("cuda", 1)
ENDS_MEANWHILE = """
import ctypes, sys, threading
import torch
from elasticmoe.runtime.device import cudart
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.pinning import Pinning
from elasticmoe.runtime.hostpool.layout import HostLayout
libc, begun = ctypes.CDLL(None), threading.Semaphore(0)
class Runtime:
    def cudaSetDevice(self, _):
        return 0
    def cudaHostRegister(self, *_):
        begun.release()
        return libc.sleep(int(sys.argv[1]))
cudart.library = Runtime
pool = HostPool(HostLayout(num_layers=1, num_experts=2, rows=4, cols=8, itemsize=4), torch.float32)
libc.on_exit(libc.sleep, None)  # for as many seconds as the exit code says, once the interpreter is gone
pinning = Pinning(pool, torch.device("cuda", 0))
begun.acquire()
sys.exit(3)
"""
"""A process that ends with 3 while its pool is being pinned, for which a sleep stands."""


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
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[Thread, int]:
    """Return the index of the device that each thread chose."""
    devices = dict[Thread, int]()

    def set_device(index: int) -> int:
        devices[current_thread()] = index
        return 0

    monkeypatch.setattr(cudart, "set_device", set_device)
    return devices


def test_it_goes_on_beside_the_caller(chosen: dict[Thread, int]) -> None:
    """In a thread that has chosen the worker's device, not the first one, and doesn't keep a process that ends."""
    pool = _Pool(0)
    pinning = Pinning(pool, DEVICE)
    pool.may_end.set()  # the caller went on while the pool wasn't pinned
    assert pinning.wait().error == 0
    assert pool.pinned_by is not None
    assert pool.pinned_by.daemon
    assert chosen == {pool.pinned_by: 1}
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


def test_a_device_that_can_not_be_chosen_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be served by that device, from whichever memory."""
    monkeypatch.setattr(cudart, "set_device", lambda _: 101)
    with pytest.raises(RuntimeError, match=r"for cuda:1, .* refused to choose \(error 101\)"):
        Pinning(_Pool(0), DEVICE).wait()


@pytest.mark.parametrize("register_s", [1, 60])
def test_a_process_that_ends_neither_waits_for_pinning_nor_aborts(register_s: int) -> None:
    """Also where CUDA comes back when the interpreter is gone, as it is while what C has to do at the end is done."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_MEANWHILE, str(register_s)], capture_output=True, text=True, timeout=40, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, "")


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


class _Ended(Pinning):
    """A pinning that has ended as the test says."""

    def __init__(self, error: int | None) -> None:
        self._end = Future()
        if error is None:
            self._end.set_exception(MemoryError("no thread"))
        else:
            self._end.set_result(Pinned(error, 1.5))


def _agree(rank: int, error: int | None, store: Path, have: Path) -> None:
    """Be one rank of two, whose pinning ended with `error`; None: it raised."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    group = torch.distributed.group.WORLD
    assert group is not None
    try:
        said = str(wait_for_all(_Ended(error), group).error)
    except (MemoryError, RuntimeError) as fault:
        said = str(fault)
    have.write_text(said, encoding="ascii")
    torch.distributed.destroy_process_group()


ELSEWHERE = "the host pool could not be pinned on another rank, whose own error tells why"


@pytest.mark.parametrize(
    ("errors", "want"),
    [
        ((0, 2), ["2", "2"]),
        ((0, 0), ["0", "0"]),
        ((None, 0), ["no thread", ELSEWHERE]),
        ((2, None), [ELSEWHERE, "no thread"]),
        ((None, None), ["no thread", "no thread"]),
    ],
)
def test_ranks_agree_on_whether_they_are_pinned(
    tmp_path: Path, errors: tuple[int | None, int | None], want: list[str]
) -> None:
    """One rank's refusal is every rank's: graphs are captured together or not at all. Nor is a fault kept from any."""
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
    assert [file.read_text(encoding="ascii") for file in files] == want
