"""The policies by the name that the configuration gives them."""

from collections.abc import Callable

from elasticmoe.runtime.adjuster.policies import fixed, goodput, threshold
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.contract.config import PolicyName, RuntimeConfig
from elasticmoe.runtime.pages.changes import Plan

PlanFunction = Callable[[Snapshot, RuntimeConfig], Plan]
"""With `short_pages` > 0 a plan only evicts: at least so many pages net of loading buffers, or nothing."""

POLICIES: dict[PolicyName, PlanFunction] = {"threshold": threshold.plan, "fixed": fixed.plan, "goodput": goodput.plan}
