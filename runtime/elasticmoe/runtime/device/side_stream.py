"""A CUDA stream beside the one that computes; on a CPU there is one order only, and it does nothing."""

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """Launches beside what is enqueued next on the computing stream, before others where both could run."""

    def __init__(self, device: torch.device) -> None:
        """Open the stream."""
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after(self, other: "SideStream | None" = None) -> Iterator[None]:
        """Launch inside after all that was enqueued on the computing stream so far, and on `other`."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        if other is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Have the computing stream wait for all that was launched here so far."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
