"""The pool's geometry out of vLLM's configuration: the same arithmetic on the scheduler and on every worker."""

from collections.abc import Iterable

from vllm.config import VllmConfig

from elasticmoe.runtime.contract.config import RunSettings, RuntimeConfig
from elasticmoe.runtime.contract.model import ModelShape
from elasticmoe.runtime.engine.setup import model_shape
from elasticmoe.runtime.errors import UnsupportedError
from elasticmoe.runtime.expert_load import ExpertLoad, read_profile
from elasticmoe.runtime.pages.placement import Geometry
from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers
from elasticmoe.runtime.units import ceil_div


def page_tiers(vllm_config: VllmConfig, kv_page_bytes: Iterable[int]) -> Tiers:
    """Return the page sizes for this model; `kv_page_bytes` are the bytes of one block in each layer."""
    sizes = list(kv_page_bytes)
    if len(set(sizes)) != 1:
        message = f"layers whose KV blocks differ in size can't share pages yet, this model has {sorted(set(sizes))}"
        raise UnsupportedError(message)
    shape = model_shape(vllm_config)
    itemsize = vllm_config.model_config.dtype.itemsize
    matrix = shape.matrix_bytes(itemsize, vllm_config.parallel_config.tensor_parallel_size)
    return fit_tiers(matrix, sum(sizes))


def pool_geometry(vllm_config: VllmConfig, config: RuntimeConfig, tiers: Tiers, num_blocks: int) -> Geometry:
    """Return the arena and the model as the pool sees them."""
    shape = model_shape(vllm_config)
    return Geometry(
        tiers=tiers,
        num_blocks=num_blocks,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        loading_depth=config.loading_depth,
        request_blocks=ceil_div(vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size),
    )


def start_load(shape: ModelShape, config: RuntimeConfig, settings: RunSettings) -> ExpertLoad:
    """Return what is known of the experts' load at start: the offline profile if one is given."""
    load = ExpertLoad(shape.num_layers, shape.num_experts, config.adjuster.half_life_tokens, shape.top_k)
    if settings.profile is not None:
        load.seed(read_profile(settings.profile, shape.num_layers, shape.num_experts))
    return load
