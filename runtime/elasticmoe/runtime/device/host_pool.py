"""The masters of all experts in host memory, pinned for a GPU where the driver allows it."""

import mmap
import warnings
import weakref

import torch

from elasticmoe.runtime.device import cudart
from elasticmoe.runtime.hostpool import memory
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.units import MATRICES, ExpertKey

MAX_REGISTER_BYTES = 64 * 2**30
"""One cudaHostRegister call covers at most this: larger ones fail (vllm-project/vllm#51080)."""


class HostPool:
    """All experts of one rank; filled by the loader or mapped full, read by fetches, never written once serving."""

    def __init__(self, layout: HostLayout, dtype: torch.dtype, mapped: mmap.mmap | None = None) -> None:
        """Map memory for the loader to fill; or read the full pool that is `mapped`, where a write would be fatal."""
        self.layout = layout
        self.dtype = dtype
        self.is_pinned = False
        self.is_mapped = mapped is not None
        """Whether the pool came full, from a coordinator."""
        own = mapped if mapped is not None else memory.allocate(layout.pool_bytes)
        self._bytes = _as_tensor(own, layout.pool_bytes)

    def gate_up(self, layer: int) -> torch.Tensor:
        """Return the layer's W1 over W3 as vLLM's loaders want them: [N, 2 f, d]."""
        lay = self.layout
        return self._typed(layer).as_strided(
            (lay.num_experts, 2 * lay.rows, lay.cols), (MATRICES * lay.rows * lay.cols, lay.cols, 1)
        )

    def down(self, layer: int) -> torch.Tensor:
        """Return the layer's W2: [N, d, f]."""
        lay = self.layout
        typed = self._typed(layer)
        size = lay.rows * lay.cols
        return typed.as_strided(
            (lay.num_experts, lay.cols, lay.rows), (MATRICES * size, lay.rows, 1), typed.storage_offset() + 2 * size
        )

    def matrices(self, key: ExpertKey) -> list[torch.Tensor]:
        """Return the bytes of W1, W3 and W2 of one expert, each uint8 [E]."""
        start, size = self.layout.offset(key), self.layout.matrix_bytes
        return [self._bytes[start + m * size : start + (m + 1) * size] for m in range(MATRICES)]

    def pin(self) -> int:
        """Register the memory with CUDA in chunks, and return 0.

        Or CUDA's error code: then the memory stays pageable, and no later call sees the error.
        """
        start, end = self._bytes.data_ptr(), self._bytes.data_ptr() + self._bytes.numel()
        done = list[int]()
        memory.populate(start, end - start, is_writable=not self.is_mapped)  # CUDA makes them one after the other
        flags = cudart.READ_ONLY if self.is_mapped else 0
        for chunk in range(start, end, MAX_REGISTER_BYTES):
            error = cudart.register(chunk, min(MAX_REGISTER_BYTES, end - chunk), flags)
            if error:
                _unregister(done)
                return error
            done.append(chunk)
        self.is_pinned = True
        self._unpin = weakref.finalize(self, _unregister, done)
        self._unpin.atexit = False  # the process's end unregisters by itself
        return 0

    def unpin(self) -> None:
        """Have the memory be pageable again, if it is pinned; no copy from it may be under way."""
        if self.is_pinned:
            self.is_pinned = False
            self._unpin()

    def _typed(self, layer: int) -> torch.Tensor:
        start = layer * self.layout.layer_bytes
        return self._bytes[start : start + self.layout.layer_bytes].view(self.dtype)


def _as_tensor(mapped: mmap.mmap, num_bytes: int) -> torch.Tensor:
    with warnings.catch_warnings():  # torch has no read-only tensors, and says so
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes)


def _unregister(starts: list[int]) -> None:
    """Give registered chunks back to the system; memory that is unmapped while registered would block its address."""
    for start in starts:
        cudart.unregister(start)
