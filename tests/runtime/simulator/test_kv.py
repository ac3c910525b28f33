"""KV on stock vLLM's fixed room, and on the shared pool, where experts give way before a request fails."""

from elasticmoe.runtime.adjuster.adjuster import Demand
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.simulator.hardware import H200
from elasticmoe.runtime.simulator.kv import ElasticKv, StockKv
from elasticmoe.runtime.simulator.requests import Arrival, Request
from elasticmoe.runtime.simulator.system import System
from tests.runtime.simulator.models import tiny


def request() -> Request:
    """Return a request without blocks."""
    return Request(Arrival(0.0, 1, 1), 0, 1)


def make_elastic(limit: int) -> ElasticKv:
    """Return a pool of all experts and 16 blocks."""
    model = tiny()
    kv_bytes = 16 * model.tiers.block_bytes
    kv = System(model, H200, kv_bytes, RuntimeConfig(policy="threshold"), limit, max_model_len=64).make_kv()
    assert isinstance(kv, ElasticKv)
    return kv


def test_stock_gives_what_is_free_or_nothing() -> None:
    """Nine usable blocks of ten; what is wanted beyond the new blocks must be free too."""
    kv, one = StockKv(10), request()
    assert not kv.allocate(one, 2, 10, 0)
    assert kv.allocate(one, 9, 9, 0)
    assert not kv.allocate(one, 1, 1, 0)
    kv.free(one)
    assert (kv.num_free, one.blocks) == (9, [])


def test_experts_give_way_to_a_request() -> None:
    """More blocks than are free: experts are evicted until they are, and the request gets different blocks each."""
    kv, one = make_elastic(limit=16), request()
    free = kv.adjuster.table.pool.num_free_blocks
    kv.ask_demand = lambda: Demand(0, 1, 0)
    assert kv.allocate(one, free + 20, free + 20, 0)
    assert kv.num_away > 0
    assert len(set(one.blocks)) == free + 20
    kv.adjuster.table.check_integrity()


def test_the_limit_holds() -> None:
    """Where no expert may leave, the request gets nothing, and nothing changes."""
    kv, one = make_elastic(limit=0), request()
    free = kv.adjuster.table.pool.num_free_blocks
    away = kv.num_away
    assert not kv.allocate(one, free + 20, free + 20, 0)
    assert (kv.num_away, one.blocks) == (away, [])


def test_freed_blocks_bring_experts_back() -> None:
    """Once the request is gone, steps load experts until all are home."""
    kv, one = make_elastic(limit=16), request()
    home, free = kv.num_away, kv.adjuster.table.pool.num_free_blocks
    assert kv.allocate(one, free + 20, free + 20, 0)
    kv.free(one)
    loads = 0
    while kv.adjuster.wants_step():
        kv.adjuster.begin_step()
        loads += kv.adjust(Demand(0, 0, 0))
    assert kv.num_away <= home
    assert loads > 0
    kv.adjuster.table.check_integrity()
