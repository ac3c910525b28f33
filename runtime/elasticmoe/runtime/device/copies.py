"""Planned copies from the host pool: on a stream of their own where there is a GPU, at once where there is none.

Order that keeps pages safe: copies start after the forwards enqueued before them (`start`), and forwards enqueued
after `wait` see them finished.
"""

from typing import Protocol

import torch


class Copies(Protocol):
    """Copies into the arena, ordered against forwards."""

    def start(self) -> None:
        """Order what is copied next after everything enqueued so far."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy bytes from the host into the arena."""

    def finish(self) -> None:
        """Close the group of copies that `start` began."""

    def wait(self) -> None:
        """Order what is enqueued next after the last finished group."""


class DirectCopies:
    """Copies on a CPU: done when `copy` returns."""

    def start(self) -> None:
        """Do nothing: there is one order only."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy now."""
        dst.copy_(src)

    def finish(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing: every copy is done."""


class StreamCopies:
    """Copies on a side stream of the current CUDA device."""

    def __init__(self) -> None:
        """Open the stream."""
        self._stream = torch.cuda.Stream()
        self._done: torch.cuda.Event | None = None

    def start(self) -> None:
        """Make the side stream wait for the compute stream as it stands."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue one copy; `src` should be pinned, else the copy is synchronous."""
        with torch.cuda.stream(self._stream):
            dst.copy_(src, non_blocking=True)

    def finish(self) -> None:
        """Record where the group ends."""
        self._done = self._stream.record_event()

    def wait(self) -> None:
        """Make the compute stream wait for the last group."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
            self._done = None


def copies_for(device: torch.device) -> Copies:
    """Return the copies that fit the device."""
    return StreamCopies() if device.type == "cuda" else DirectCopies()
