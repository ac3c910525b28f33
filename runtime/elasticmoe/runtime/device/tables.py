"""The page table on the device, at a fixed address, with its mirror on the host."""

from collections.abc import Sequence

import numpy as np
import torch

from elasticmoe.runtime.device.arena import page_index
from elasticmoe.runtime.pages.changes import Entry
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import MATRICES, ExpertKey

NUM_STAGING = 4
"""Staging buffers; more than the batches that can be in flight."""


class Mirrored:
    """A device tensor rewritten from a numpy array without a sync."""

    def __init__(self, host: np.ndarray, device: torch.device) -> None:
        """Send `host` once; its address on the device never changes."""
        self.host = host
        self.device = torch.from_numpy(host.copy()).to(device)
        pin = device.type == "cuda"
        self._staging = [torch.empty(host.shape, dtype=self.device.dtype, pin_memory=pin) for _ in range(NUM_STAGING)]
        self._sent: list[torch.cuda.Event | None] = [None] * NUM_STAGING
        self._next = 0

    def send(self) -> None:
        """Copy the whole array over, in order with the forwards of the current stream."""
        index, self._next = self._next, (self._next + 1) % NUM_STAGING
        if (sent := self._sent[index]) is not None:
            sent.synchronize()
        self._staging[index].copy_(torch.from_numpy(self.host))
        self.device.copy_(self._staging[index], non_blocking=True)
        if self.device.is_cuda:
            self._sent[index] = torch.cuda.current_stream().record_event()


class DeviceTable:
    """Where each expert is read from; rows always point somewhere valid, before the arena exists at page index 0."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        """Start with every row at page index 0 and every expert resident: nothing is fetched without an arena."""
        self._pages = Mirrored(np.zeros((num_layers, num_experts, MATRICES), dtype=np.int32), device)
        self._resident = Mirrored(np.ones((num_layers, num_experts), dtype=np.bool_), device)
        self.pages_by_layer = self.pages.unbind()
        """Of each layer [experts, 3]: views of `pages`, which take the host time to make."""
        self.resident_by_layer = self.resident.unbind()
        """Of each layer [experts]: views of `resident`."""

    @property
    def pages(self) -> torch.Tensor:
        """Return [layers, experts, 3] int32 page indices on the device; the address never changes."""
        return self._pages.device

    @property
    def resident(self) -> torch.Tensor:
        """Return [layers, experts] bool on the device: whether the row is the expert's own pages."""
        return self._resident.device

    def write(self, entries: Sequence[Entry], tiers: Tiers) -> None:
        """Rewrite rows, in order with the forwards."""
        for entry in entries:
            self.point(entry.key, [page_index(tiers, page) for page in entry.pages], is_resident=entry.is_resident)
        if entries:
            self.send()

    def point(self, key: ExpertKey, indices: list[int], *, is_resident: bool) -> None:
        """Rewrite one row of the mirror; the device sees it after `send`."""
        self._pages.host[key] = indices
        self._resident.host[key] = is_resident

    def send(self) -> None:
        """Bring the device in line with the mirror, in order with the forwards."""
        self._pages.send()
        self._resident.send()

    def row(self, key: ExpertKey) -> list[int]:
        """Return the page indices of one expert, from the mirror."""
        return [int(index) for index in self._pages.host[key]]

    def is_whole(self, layer: int) -> bool:
        """Return whether no expert of a layer must be fetched before it is used, from the mirror."""
        return bool(self._resident.host[layer].all())

    def offloaded(self, layer: int) -> np.ndarray:
        """Return [experts] bool: which experts of a layer must be fetched before they are used, from the mirror."""
        offloaded: np.ndarray = ~self._resident.host[layer]
        return offloaded
