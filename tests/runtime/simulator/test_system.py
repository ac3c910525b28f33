"""The parts of an engine that follow from a model, a GPU and its memory."""

from dataclasses import replace

import pytest

from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.simulator.hardware import H200
from elasticmoe.runtime.simulator.kv import ElasticKv, StockKv
from elasticmoe.runtime.simulator.system import System
from tests.runtime.simulator.models import qwen3


def test_both_systems_get_the_same_bytes() -> None:
    """1 GiB beside all experts: 682 blocks for stock, an arena of experts and those blocks for the pool."""
    stock = System(qwen3(), H200, 2**30).make_kv()
    assert isinstance(stock, StockKv)
    assert stock.num_free == 681
    system = System(qwen3(), H200, 2**30, RuntimeConfig())
    assert system.geometry().num_blocks == 682 + 48 * 128 * 6
    assert isinstance(system.make_kv(), ElasticKv)


def test_a_room_for_less_than_one_request_is_refused() -> None:
    """4,096 tokens need 384 MiB and the null block."""
    with pytest.raises(
        PoolTooSmallError, match=r"one request of 4096 tokens needs 385.50 MiB for KV, there are 256.00"
    ):
        System(qwen3(), H200, 2**28).make_kv()


def test_the_configuration_says_when_fetches_start() -> None:
    """Without lookahead, which is the default and stock's, none starts before its layer's routing."""
    stock = System(qwen3(), H200, 2**30, hides_fetches=False, is_eager=True)
    assert not stock.make_steps().looks_ahead
    assert not replace(stock, config=RuntimeConfig()).make_steps().looks_ahead
    ahead = replace(stock, config=RuntimeConfig(lookahead=1)).make_steps()
    assert ahead.looks_ahead
    assert (ahead.is_eager, ahead.hides_fetches) == (True, False)
