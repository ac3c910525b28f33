"""Names that runtime, operator, dashboards and users agree on: metrics and their labels."""

from typing import Literal, get_args

ARENA_BYTES = "elasticmoe_arena_bytes"
RESIDENT_EXPERTS = "elasticmoe_resident_experts"
OFFLOAD_LIMIT = "elasticmoe_expert_offload_limit"
LAYERS_AT_LIMIT = "elasticmoe_layers_at_limit"
EXPERT_FETCHES = "elasticmoe_expert_fetches_total"
FETCH_BYTES = "elasticmoe_fetch_bytes_total"
EXPOSED_FETCH_SECONDS = "elasticmoe_exposed_fetch_seconds_total"
ADJUSTER_CHANGES = "elasticmoe_adjuster_changes_total"
ADJUSTER_DECISIONS = "elasticmoe_adjuster_decisions_total"
PAGES_SHORT = "elasticmoe_pages_short"
ROUTED_RESIDENT_RATIO = "elasticmoe_routed_resident_ratio"
RECOVERY_SECONDS = "elasticmoe_recovery_seconds"
KV_CURRENT_USAGE_RATIO = "elasticmoe_kv_current_usage_ratio"

ARENA_OWNERS = ("expert", "kv", "ssm", "loading", "free", "trapped")
FETCH_KINDS = ("planned", "predicted", "missed")
CHANGE_KINDS = ("evict", "load", "swap")
Cause = Literal["short", "low", "room", "limit", "hotter", "refused"]
"""Why the adjuster decided: a request was short of pages, few were free, many were free, the limit says so, an expert
away was hotter than one here; or a request was short, and evicting could not help or would not pay."""
CAUSES: tuple[Cause, ...] = get_args(Cause)
LIMIT_KINDS = ("requested", "effective")

ENV_REFUSAL_FILE = "ELASTICMOE_REFUSAL_FILE"
"""Where a process that refuses to start leaves its sentence for `elasticmoe serve`."""
