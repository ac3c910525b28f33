"""Names of the coordinator's series: what its /metrics has, beside the engine's in `names`."""

CHECKPOINT_BYTES_READ = "elasticmoe_checkpoint_bytes_read_total"
HOST_POOL_BYTES = "elasticmoe_host_pool_bytes"
HOST_POOL_LEASES = "elasticmoe_host_pool_leases"
HOST_POOL_LOAD_SECONDS = "elasticmoe_host_pool_load_seconds"
HOST_POOLS_ADOPTED = "elasticmoe_host_pools_adopted_total"

METRICS_PORT = 9401
