"""What vLLM's workers get from the bench by `worker_extension_cls`: importing this patches a worker's process.

vLLM imports it in every worker, forked or spawned, before the worker has a device or a model.
"""

from typing import Any

import torch

from bench.matrix import forced, weights

weights.install()
forced.install()


class WorkerExtension:
    """Methods for `collective_rpc`; vLLM makes this a base of its worker class."""

    device: Any

    def set_skewed(self, is_skewed: bool) -> None:  # noqa: FBT001
        """Switch the routing from the next step on."""
        forced.active_routing().set_skewed(is_skewed=is_skewed)

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes in use on the worker's device, by torch and in all; nothing on a CPU."""
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        return {"allocated": torch.cuda.memory_allocated(self.device), "used": total - free}

    def pinning_s(self) -> tuple[float | None, float | None]:
        """Return the seconds that pinning the host pool took and was waited for; None on a CPU, and of stock."""
        return getattr(self, "pin_s", None), getattr(self, "pin_waited_s", None)
