"""The launcher against Triton's own launch, on a driver that notes what either would have launched."""

from collections import defaultdict

import pytest
import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from elasticmoe.kernels.launcher import Launcher, ceil_div, next_power_of_2
from elasticmoe.kernels.paged_moe import gate_up_kernel
from elasticmoe.kernels.tiles import store_tile
from tests.fakes.triton_driver import STREAM, FakeDriver

HIDDEN = torch.zeros((4, 16), dtype=torch.bfloat16)
PAGES = torch.zeros((4, 64, 16), dtype=torch.bfloat16)
WORDS = torch.zeros(64, dtype=torch.int32)
DESC = TensorDescriptor.from_tensor(PAGES, [1, 16, 16])
PLAIN = (HIDDEN, PAGES, None, HIDDEN, WORDS, WORDS, WORDS, 8, 4, 1024)
"""Rows, pages, their descriptor, result, slots, blocks, how many; pairs, blocks, elements a page."""
CONSTANTS = (2, 64, 16, 16, 16, 16, 1, 0, False, False, False, "all")
BY_DESCRIPTOR = (2, 64, 16, 16, 16, 16, 1, 0, True, False, False, "all")
CASES: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "plain": (PLAIN, CONSTANTS),
    "another constant": (PLAIN, (*CONSTANTS[:-1], "resident")),
    "a descriptor": ((*PLAIN[:2], DESC, *PLAIN[3:]), BY_DESCRIPTOR),
    "one array less": ((*PLAIN[:6], None, *PLAIN[7:]), CONSTANTS),
    "an address that isn't aligned": ((*PLAIN[:4], WORDS[1:], *PLAIN[5:]), CONSTANTS),
    "another type": ((*PLAIN[:4], WORDS.long(), *PLAIN[5:]), CONSTANTS),
    "a number that isn't a multiple": ((*PLAIN[:9], 1000), CONSTANTS),
    "one": ((*PLAIN[:9], 1), CONSTANTS),
    "a large number": ((*PLAIN[:9], 2**33), CONSTANTS),
    "a large number of pairs": ((*PLAIN[:7], 2**33, *PLAIN[8:]), CONSTANTS),
    "one pair": ((*PLAIN[:7], 1, *PLAIN[8:]), CONSTANTS),
}


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(gate_up_kernel, "device_caches", defaultdict(gate_up_kernel.create_binder))
    return fake


def _addresses(args: tuple[object, ...]) -> list[object]:
    return [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]


def test_it_launches_what_triton_would(_driver: FakeDriver) -> None:  # noqa: PT019 -- what it launched is asked for
    """For every kind of arguments, first and again, in any order: the same kernel, grid, stream and arguments."""
    launch = Launcher(gate_up_kernel)
    for name, (args, constants) in [*CASES.items(), *reversed(CASES.items())]:
        launch((3, 2), *args, *constants, num_warps=1)
        gate_up_kernel[3, 2](*args, *constants, num_warps=1)
        ours, tritons = _driver.launches[-2:]
        assert ours.kernel == tritons.kernel, name
        assert (ours.grid, ours.stream) == (tritons.grid, tritons.stream) == ((3, 2, 1), STREAM), name
        assert _addresses(ours.args) == _addresses(tritons.args), name
    assert len({one.kernel for one in _driver.launches}) == len(CASES) - 1, "how many pairs makes no difference"


def test_what_is_compiled_is_launched_without_triton(_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: PT019
    """Whatever the numbers that nothing is compiled for; with another option, Triton compiles anew."""
    launch, asked, run = Launcher(gate_up_kernel), [], gate_up_kernel.run

    def spy(*args: object, **more: object) -> object:
        asked.append(more["num_warps"])
        return run(*args, **more)

    monkeypatch.setattr(gate_up_kernel, "run", spy)
    for pairs in (64, 7, 1):
        launch((1,), *PLAIN[:7], pairs, *PLAIN[8:], *CONSTANTS, num_warps=1)
    launch((1,), *PLAIN, *CONSTANTS, num_warps=2)
    assert asked == [1, 2]
    assert [one.args[7] for one in _driver.launches] == [64, 7, 1, 8]


def test_a_profiler_hears_of_every_launch(_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: PT019
    """Triton tells the hooks, so it launches while there are any."""
    launch, grids = Launcher(gate_up_kernel), []
    launch((1,), *PLAIN, *CONSTANTS, num_warps=1)
    monkeypatch.setattr(gate_up_kernel, "run", lambda *_, **more: grids.append(more["grid"]))
    knobs.runtime.launch_enter_hook.add(print)
    try:
        launch((5,), *PLAIN, *CONSTANTS, num_warps=1)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    launch((6,), *PLAIN, *CONSTANTS, num_warps=1)
    assert grids == [(5,)]
    assert [one.grid[0] for one in _driver.launches] == [1, 6]


def test_a_kernel_with_a_constant_before_an_argument_is_refused() -> None:
    """What follows the arguments is taken for constants."""
    kernel = triton.JITFunction(store_tile.fn)
    kernel.params = [*kernel.params[-1:], *kernel.params[:-1]]
    with pytest.raises(AssertionError, match="store_tile: a constant before an argument"):
        Launcher(kernel)


@pytest.mark.parametrize("number", [1, 2, 3, 127, 128, 129, 8192, 8193])
def test_sizes_are_tritons(number: int) -> None:
    """The plain arithmetic gives what Triton's does."""
    assert next_power_of_2(number) == triton.next_power_of_2(number)
    assert [ceil_div(number, by) for by in (1, 7, 128)] == [triton.cdiv(number, by) for by in (1, 7, 128)]
