"""Fixed split: each layer offloads exactly the limit, whatever the load (Fate's cache, the papers' baseline)."""

import numpy as np

from elasticmoe.runtime.adjuster.choose import choose_loads
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.pages.changes import Plan
from elasticmoe.runtime.pages.table import RESIDENT
from elasticmoe.runtime.units import MATRICES, ExpertKey


def plan(snap: Snapshot, config: RuntimeConfig) -> Plan:
    """Return the evictions, then the loads, that bring each layer to `limit` offloaded experts; none for KV's sake."""
    if snap.short_pages > 0:
        return Plan(reason="a fixed split evicts nothing for KV")
    reason = f"{snap.limit} experts a layer are to be offloaded"
    room = snap.limit - snap.num_slotted
    if room.max() > 0 and (evict := _coldest(snap, room)):
        return Plan(evict=evict, reason=reason, cause="limit")
    if room.min() >= 0:
        return Plan(reason=reason, cause="limit")
    excess = int((snap.num_offloaded - snap.limit).clip(min=0).sum())
    num = min(config.adjuster.thresholds.grow_most, snap.free_pages // MATRICES, excess)
    return Plan(load=choose_loads(snap, num), reason=reason, cause="limit")


def _coldest(snap: Snapshot, num: np.ndarray) -> tuple[ExpertKey, ...]:
    """Return the `num` [layers] coldest resident experts of each layer, coldest first."""
    order = np.argsort(snap.resident_heat(), axis=1)
    is_chosen = np.arange(snap.num_experts) < np.minimum(num, (snap.state == RESIDENT).sum(axis=1))[:, None]
    layers, places = np.nonzero(is_chosen)
    return tuple(map(ExpertKey, layers.tolist(), order[layers, places].tolist()))
