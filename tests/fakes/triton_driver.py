"""A Triton driver of a Hopper GPU that isn't there: kernels are compiled, and what would be launched is noted."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget

HOPPER = GPUTarget("cuda", 90, 32)
STREAM = 7
SHARED_BYTES = 232448
BEFORE_ARGUMENTS = 9
"""Grid, stream, function, its metadata, the launch's and two hooks come first."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What would have been launched."""

    kernel: str
    """The compiled kernel's hash."""
    grid: tuple[object, ...]
    stream: object
    args: tuple[object, ...]


def _utils() -> SimpleNamespace:
    return SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES},
    )


@dataclass(slots=True)
class FakeDriver:
    """Stands where `triton.runtime.driver` looks for the active one."""

    launches: list[Launch] = field(default_factory=list)
    utils: SimpleNamespace = field(default_factory=_utils)

    def launcher_cls(self, src: object, metadata: SimpleNamespace) -> object:
        """Return what a compiled kernel is launched by."""
        del src

        def launch(*args: object) -> None:
            grid, stream = args[:3], args[3]
            self.launches.append(Launch(metadata.hash, grid, stream, args[BEFORE_ARGUMENTS:]))

        return launch

    def get_current_device(self) -> int:
        """Return the only one's index."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return a handle."""
        del device
        return STREAM

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return HOPPER
