"""vLLM's entry point into elasticmoe: makes `additional_config={"elasticmoe": {…}}` mean what it says.

vLLM calls `register` in every process, perhaps more than once. Without our key in the configuration nothing changes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MARK = "_elasticmoe_wrapped"


def register() -> None:
    """Have vLLM's platform check hand every configuration to us as well; safe to call again."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if getattr(platform, _MARK, False):
        return
    stock, stock_defaults = platform.check_and_update_config, platform.apply_config_platform_defaults

    def apply_config_platform_defaults(vllm_config: "VllmConfig") -> None:
        from elasticmoe.runtime.engine import setup

        config = setup.requested(vllm_config)
        if config is not None:
            setup.set_defaults(vllm_config, config)
        stock_defaults(vllm_config)

    def check_and_update_config(vllm_config: "VllmConfig") -> None:
        from elasticmoe.runtime.engine import setup

        config = setup.requested(vllm_config)
        if config is not None:
            setup.prepare(vllm_config, config)
        stock(vllm_config)
        if config is not None:
            setup.finish(vllm_config, config)

    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.apply_config_platform_defaults = staticmethod(apply_config_platform_defaults)
    setattr(platform, _MARK, True)
