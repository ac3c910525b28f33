"""Launches a Triton kernel as it was compiled for arguments of the same kinds, without binding them anew.

Called by `launch`, `align` and `fetch`. In a step that no CUDA graph holds, such as one with prompts, the host's time
counts. Most of what Triton's launch takes goes into finding what is compiled, and into asking about pointers.
"""

from collections.abc import Hashable

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNED = 16
"""Triton compiles for whether an address, or a number, is a multiple of this."""
MOST_INT32 = 2**31 - 1


class Launcher:
    """Finds what is compiled by the kinds of the arguments; asks Triton for what isn't, and where that interprets."""

    def __init__(self, kernel: KernelInterface) -> None:
        """Launch `kernel`, a `triton.jit` function whose constants come last."""
        self._kernel = kernel
        self._compiled: dict[Hashable, CompiledKernel] = {}
        self._is_for_value: list[bool] = []
        """Of each argument that isn't a constant: whether the kernel is compiled for what number it is."""
        if isinstance(kernel, JITFunction):
            arguments = [param for param in kernel.params if not param.is_constexpr]
            assert arguments == kernel.params[: len(arguments)], f"{kernel.__name__}: a constant before an argument"
            self._is_for_value = [not param.do_not_specialize for param in arguments]

    def __call__(self, grid: tuple[int, ...], *args: object, **options: object) -> None:
        """Launch on the current device and stream; `args` are all of the kernel's, `options` the compiler's."""
        if not self._is_for_value or _is_watched():
            self._kernel[grid](*args, **options)
            return
        device, kinds, bound = driver.active.get_current_device(), [], []
        for arg, is_for_value in zip(args, self._is_for_value, strict=False):
            kind, value = _bind(arg, is_for_value=is_for_value)
            kinds.append(kind)
            bound.append(value)
        constants = args[len(bound) :]
        key = (device, *kinds, *constants, *options.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*args, **options)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream, rest = driver.active.get_current_stream(device), (None, None, None, *bound, *constants)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, *rest)


def ceil_div(number: int, by: int) -> int:
    """Return the quotient rounded up; `triton.cdiv` takes the host 2 µs (bench/launches.py)."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that `number`, at least 1, doesn't exceed."""
    return 1 << (number - 1).bit_length()


def _is_watched() -> bool:
    """Return whether a profiler wants to hear of launches, which Triton's own tells it."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _bind(arg: object, *, is_for_value: bool) -> tuple[Hashable, object]:
    """Return what of an argument a kernel is compiled for, and what is given to it: of a tensor its address."""
    if arg is None:
        return None, None
    if isinstance(arg, torch.Tensor):
        address = arg.data_ptr()
        return (arg.dtype, address % ALIGNED == 0), address
    if isinstance(arg, TensorDescriptor):
        return (arg.base.dtype, *arg.block_shape), arg
    assert isinstance(arg, int), f"{arg} is neither array nor number"
    if is_for_value:
        return (arg > MOST_INT32, arg == 1, arg % ALIGNED == 0), arg
    return arg > MOST_INT32, arg
