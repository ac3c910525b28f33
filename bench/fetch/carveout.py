"""How much of a multiprocessor's cache a fetch leaves to the shared memory of kernels beside it.

A fetch needs next to no shared memory itself. Where the driver sets a multiprocessor up for that, no block of a GEMM,
which needs most of it, can start there until the fetch has ended.
"""

import ctypes

import torch

from elasticmoe.kernels import fetch

PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the driver."""


def prefer_shared(percent: int) -> int:
    """Ask for so much of it, from 0 to 100, for the fetch kernels that have run here; -1: as the driver likes.

    Returns how many there are. A graph has what was asked for when it was captured.
    """
    driver, num = ctypes.CDLL("libcuda.so.1"), 0
    for kernel in fetch._fetch.device_caches[torch.cuda.current_device()][0].values():  # noqa: SLF001
        if kernel.function is None:
            continue
        code = driver.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), PREFERRED_CARVEOUT, percent)
        assert code == 0, f"the driver said {code} to a carveout of {percent} %"
        num += 1
    return num
