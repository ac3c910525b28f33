"""Fixed split: each layer offloads exactly the limit, whatever the load (Fate's cache, the papers' baseline)."""

from elasticmoe.runtime.adjuster.choose import choose_loads
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.pages.changes import Plan
from elasticmoe.runtime.units import MATRICES, ExpertKey


def plan(snap: Snapshot, config: RuntimeConfig) -> Plan:
    """Return the evictions, then the loads, that bring each layer to `limit` offloaded experts; none for KV's sake."""
    if snap.short_pages > 0:
        return Plan(reason="a fixed split evicts nothing for KV")
    room = (snap.limit - snap.num_slotted).tolist()
    evict = tuple(
        ExpertKey(layer, expert)
        for layer in range(snap.num_layers)
        if room[layer] > 0
        for expert in snap.coldest(layer)[: room[layer]]
    )
    if evict:
        return Plan(evict=evict, reason=f"{snap.limit} experts a layer are to be offloaded")
    excess = int((snap.num_offloaded - snap.limit).clip(min=0).sum())
    num = min(config.adjuster.thresholds.grow_most, snap.free_pages // MATRICES, excess)
    return Plan(load=choose_loads(snap, num), reason=f"{snap.limit} experts a layer are to be offloaded")
