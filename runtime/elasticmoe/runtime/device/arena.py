"""The arena: one byte tensor on the device, and the views through which experts and kernels see its pages."""

import torch

from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import MATRICES, PageId


class Arena:
    """Views over one allocation; page indices count granules, so that one stride reaches every page."""

    def __init__(self, storage: torch.Tensor, granule_bytes: int, layout: HostLayout, dtype: torch.dtype) -> None:
        """Lay views over `storage`, uint8 [bytes]."""
        self.storage = storage
        self.granule_bytes = granule_bytes
        self._matrix_bytes = layout.matrix_bytes
        typed = storage.view(dtype)
        stride = granule_bytes // layout.itemsize
        num = (storage.numel() - layout.matrix_bytes) // granule_bytes + 1
        self.up_pages = typed.as_strided((num, layout.rows, layout.cols), (stride, layout.cols, 1))
        """[page indices, f, d]: W1 and W3."""
        self.down_pages = typed.as_strided((num, layout.cols, layout.rows), (stride, layout.rows, 1))
        """[page indices, d, f]: W2."""

    def page(self, index: int) -> torch.Tensor:
        """Return the bytes of one page by its index, uint8 [E]."""
        start = index * self.granule_bytes
        return self.storage[start : start + self._matrix_bytes]


def page_index(tiers: Tiers, page: PageId) -> int:
    """Return the index of a page in the arena's views."""
    return tiers.page_offset(page) // tiers.granule_bytes


def temporary_arena(layout: HostLayout, dtype: torch.dtype, device: torch.device) -> Arena:
    """Return an arena of one expert, for the forwards that run before the real one exists."""
    storage = torch.zeros(MATRICES * layout.matrix_bytes, dtype=torch.uint8, device=device)
    return Arena(storage, layout.matrix_bytes, layout, dtype)
