"""Rimuru's policy: evict when short or nearly so, load when there is room, with a gap between the two.

Source: "Rimuru: Unified Memory Management for Modern LLM Serving via Elastic Expert Offloading", the adjuster.
"""

from elasticmoe.runtime.adjuster.choose import choose_evictions, choose_loads
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.pages.changes import Plan
from elasticmoe.runtime.units import MATRICES, ceil_div


def plan(snap: Snapshot, config: RuntimeConfig) -> Plan:
    """Return evictions when R_b pages are short or F_b runs low, loads when F_b is ample, else nothing.

    Short of R_b: ceil((R_b + 1) / 3) experts. F_b < evict_below: 1 expert. F_b > grow_above: min(grow_most,
    floor((F_b - grow_above) / 3)) experts. Differences from the paper: pages are counted net of loading buffers, what
    waiting requests will need is not given to experts, nothing is evicted as a precaution while idle, and once a step
    was measured those leave whom steps would wait for least, not those to whom least is routed.
    """
    thresholds = config.adjuster.thresholds
    if snap.short_pages > 0:
        wanted = MATRICES * ceil_div(snap.short_pages + 1, MATRICES)
        chosen = choose_evictions(snap, wanted) or choose_evictions(snap, snap.short_pages)
        if chosen is None:
            return Plan(reason=f"short of {snap.short_pages} pages, more than evictions can free")
        return Plan(evict=chosen, reason=f"short of {snap.short_pages} pages", cause="short")
    if snap.free_pages < thresholds.evict_below:
        chosen = choose_evictions(snap, 1) if snap.num_running else None
        return Plan(
            evict=chosen or (), reason=f"{snap.free_pages} pages free, below {thresholds.evict_below}", cause="low"
        )
    spare = snap.free_pages - snap.waiting_pages - thresholds.grow_above
    num = min(thresholds.grow_most, spare // MATRICES)
    loads = choose_loads(snap, num)
    return Plan(load=loads, reason=f"{snap.free_pages} pages free, above {thresholds.grow_above}", cause="room")
