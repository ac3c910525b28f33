"""Patches that force the routing into vLLM, stock and elastic alike; `worker_extension.py` installs them."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from bench.matrix.routing import NUM_ROWS, ForcedRouting
from elasticmoe.runtime.engine.next_gate import NextGate

NUM_STAGES = 4
"""Steps whose places may be on their way to the device at once."""
_active: list["Forced"] = []


class Forced:
    """One worker's routing, and the pinned memory from which its places are copied."""

    def __init__(self, num_layers: int, num_experts: int, max_tokens: int, device: torch.device) -> None:
        """Allocate everything that a captured graph will read."""
        self.routing = ForcedRouting(num_layers, num_experts, max_tokens, device)
        is_cuda = device.type == "cuda"
        self._stages = torch.zeros((NUM_STAGES, 2, max_tokens), dtype=torch.int32, pin_memory=is_cuda)
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(NUM_STAGES)]
        self._used = [0] * NUM_STAGES
        self._next = 0
        self._high = 0

    def place(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Send the step's rows and positions [T] to the device, zeros behind them; doesn't wait for the device."""
        index, num = self._next, len(rows)
        self._next = (index + 1) % NUM_STAGES
        event = self._events[index]
        if event is not None:
            event.synchronize()  # of a copy that began NUM_STAGES steps ago
        stage = self._stages[index].numpy()
        stage[0, :num], stage[1, :num] = rows, positions
        stage[:, num : self._used[index]] = 0
        self._used[index] = num
        end = max(num, self._high)
        for part in range(2):  # each contiguous: one copy without a kernel
            self.routing.places[part, :end].copy_(self._stages[index, part, :end], non_blocking=True)
        self._high = num
        if event is not None:
            event.record()


@lru_cache(maxsize=4096)
def row_of(request_id: str) -> int:
    """Return the row of a request that the client named by its number; 0 for any other."""
    head = request_id.split("-", maxsplit=1)[0]
    return int(head) % NUM_ROWS if head.isdigit() else 0


def install() -> None:
    """Patch this process, once: each worker makes its tables when its model is loaded."""
    if getattr(MoERunner, "_routing_is_forced", False):
        return
    MoERunner._routing_is_forced = True  # noqa: SLF001
    _force_logits()
    _follow_inputs()
    _foresee()


def active_routing() -> ForcedRouting:
    """Return the routing of this process's worker."""
    return _active[-1].routing


def _force_logits() -> None:
    stock = MoERunner._apply_quant_method  # noqa: SLF001

    def apply(self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, *rest: Any, **named: Any) -> Any:
        layer = extract_layer_index(self.layer_name)
        logits = active_routing().logits(layer, router_logits.shape[0], router_logits.dtype)
        return stock(self, hidden_states, logits, *rest, **named)

    MoERunner._apply_quant_method = apply  # noqa: SLF001


def _foresee() -> None:
    """Have predictions guess the forced routing, with the errors that `ForcedRouting.predicted` makes."""

    def predict(self: NextGate, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        logits = active_routing().predicted(layer, hidden.shape[0], hidden.dtype)
        return self.chosen(layer, hidden, logits)

    NextGate.__call__ = predict  # type: ignore[method-assign]


def _follow_inputs() -> None:
    stock_init, stock_prepare = GPUModelRunner.__init__, GPUModelRunner._prepare_inputs  # noqa: SLF001

    def init(self: Any, vllm_config: Any, device: torch.device, *rest: Any, **named: Any) -> None:
        stock_init(self, vllm_config, device, *rest, **named)
        config = vllm_config.model_config.hf_text_config
        num_experts = getattr(config, "num_experts", None) or config.num_local_experts
        max_tokens = max(vllm_config.scheduler_config.max_num_batched_tokens, self.max_num_tokens)
        _active[:] = [Forced(config.num_hidden_layers, num_experts, max_tokens, device)]

    def prepare(self: Any, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        result = stock_prepare(self, scheduler_output, num_scheduled_tokens)
        batch = self.input_batch
        num_reqs = batch.num_reqs
        requests = np.repeat(np.arange(num_reqs), num_scheduled_tokens)
        starts = np.repeat(np.cumsum(num_scheduled_tokens) - num_scheduled_tokens, num_scheduled_tokens)
        within = np.arange(len(requests)) - starts
        rows = np.fromiter(map(row_of, batch.req_ids), np.int32, num_reqs)
        _active[-1].place(rows[requests], batch.num_computed_tokens_cpu[requests] + within)
        return result

    GPUModelRunner.__init__ = init
    GPUModelRunner._prepare_inputs = prepare  # noqa: SLF001
