"""One system to simulate: model, GPU, memory, policy; and the parts of the engine that follow from it."""

from dataclasses import dataclass, field

from elasticmoe.runtime.adjuster.adjuster import Adjuster
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.expert_load import ExpertLoad
from elasticmoe.runtime.pages.placement import Geometry
from elasticmoe.runtime.simulator.hardware import Gpu
from elasticmoe.runtime.simulator.kv import ElasticKv, SilentPort, StockKv
from elasticmoe.runtime.simulator.routing import RoutingName
from elasticmoe.runtime.simulator.scheduler import Limits
from elasticmoe.runtime.simulator.served import ServedModel
from elasticmoe.runtime.simulator.step_cost import StepModel
from elasticmoe.runtime.units import ceil_div, mib


@dataclass(frozen=True, slots=True)
class System:
    """All weights and `kv_bytes` more per GPU, shared by the elastic pool if there is a configuration for one."""

    model: ServedModel
    gpu: Gpu
    kv_bytes: int
    """What stock vLLM has for KV beside all weights, on each GPU."""
    config: RuntimeConfig | None = None
    """None: stock vLLM."""
    limit: int | None = None
    """The offload limit asked for; None: the least that fits, + 10."""
    routing: RoutingName = "skewed"
    max_model_len: int = 4096
    limits: Limits = field(default_factory=Limits)
    is_eager: bool = False
    hides_fetches: bool = True
    seed: int = 0

    def geometry(self) -> Geometry:
        """Return the arena and the model as the pool sees them."""
        tiers = self.model.tiers
        loading_depth = 2 if self.config is None else self.config.loading_depth
        return Geometry(
            tiers=tiers,
            num_blocks=(self.model.all_expert_bytes + self.kv_bytes) // tiers.block_bytes,
            num_layers=self.model.shape.num_layers,
            num_experts=self.model.shape.num_experts,
            loading_depth=loading_depth,
            request_blocks=ceil_div(self.max_model_len, self.model.block_size),
        )

    def make_kv(self) -> StockKv | ElasticKv:
        """Return the KV side; raises PoolTooSmallError where not even one request fits."""
        if self.config is None:
            return StockKv(self._stock_blocks())
        geometry, shape = self.geometry(), self.model.shape
        half_life = self.config.adjuster.half_life_tokens
        load = ExpertLoad(shape.num_layers, shape.num_experts, half_life, shape.top_k)
        return ElasticKv(Adjuster(geometry, self.config, load, SilentPort(), self.limit))

    def make_steps(self) -> StepModel:
        """Return what prices its steps; fetches look ahead where the configuration has them do so."""
        looks_ahead = self.config is not None and self.config.lookahead > 0
        return StepModel(self.gpu, self.model, self.is_eager, self.hides_fetches, looks_ahead)

    def _stock_blocks(self) -> int:
        block_bytes = self.model.kv_bytes * self.model.block_size
        num_blocks = self.kv_bytes // block_bytes
        needed = 1 + ceil_div(self.max_model_len, self.model.block_size)
        if num_blocks < needed:
            wanted = mib(needed * block_bytes)
            message = (
                f"one request of {self.max_model_len} tokens needs {wanted} for KV, there are {mib(self.kv_bytes)}; "
                "give KV more room or allow only shorter requests"
            )
            raise PoolTooSmallError(message)
        return num_blocks
