"""Names that runtime, operator, dashboards and users agree on: metrics and their labels."""

ARENA_BYTES = "elasticmoe_arena_bytes"
RESIDENT_EXPERTS = "elasticmoe_resident_experts"
OFFLOAD_LIMIT = "elasticmoe_expert_offload_limit"
LAYERS_AT_LIMIT = "elasticmoe_layers_at_limit"
EXPERT_FETCHES = "elasticmoe_expert_fetches_total"
FETCH_BYTES = "elasticmoe_fetch_bytes_total"
EXPOSED_FETCH_SECONDS = "elasticmoe_exposed_fetch_seconds_total"
ADJUSTER_CHANGES = "elasticmoe_adjuster_changes_total"
PAGES_SHORT = "elasticmoe_pages_short"
ROUTED_RESIDENT_RATIO = "elasticmoe_routed_resident_ratio"
RECOVERY_SECONDS = "elasticmoe_recovery_seconds"
KV_CURRENT_USAGE_RATIO = "elasticmoe_kv_current_usage_ratio"

ARENA_OWNERS = ("expert", "kv", "ssm", "loading", "free", "trapped")
FETCH_KINDS = ("planned", "predicted", "missed")
CHANGE_KINDS = ("evict", "load", "swap")
LIMIT_KINDS = ("requested", "effective")

ENV_REFUSAL_FILE = "ELASTICMOE_REFUSAL_FILE"
"""Where a process that refuses to start leaves its sentence for `elasticmoe serve`."""
