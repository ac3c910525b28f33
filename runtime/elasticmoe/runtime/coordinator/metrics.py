"""The coordinator's series, on a port of their own."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from elasticmoe.runtime.contract import pool_names as names
from elasticmoe.runtime.errors import CoordinatorError


class Metrics:
    """Counters and gauges of one coordinator process; they start at 0 with it."""

    def __init__(self) -> None:
        """Create the series."""
        self._registry = registry = CollectorRegistry()
        self.bytes_read = Counter(names.CHECKPOINT_BYTES_READ, "Bytes read from the checkpoint", registry=registry)
        self.adopted = Counter(names.HOST_POOLS_ADOPTED, "Pools taken over from workers", registry=registry)
        self.pool_bytes = Gauge(names.HOST_POOL_BYTES, "Bytes of all pools held", registry=registry)
        self.load_seconds = Gauge(names.HOST_POOL_LOAD_SECONDS, "How long the last load took", registry=registry)
        self._leases = Gauge(names.HOST_POOL_LEASES, "Workers that hold a pool", registry=registry)

    def watch_leases(self, count: Callable[[], int]) -> None:
        """Have every scrape ask for the number of leases."""
        self._leases.set_function(count)

    def serve(self, port: int) -> int:
        """Answer scrapes on all interfaces from a thread of its own; returns the port, a free one for port 0."""
        try:
            server, _ = start_http_server(port, registry=self._registry)
        except (OSError, OverflowError) as error:
            message = f"port {port} for metrics can't be had ({error}); give --metrics-port another"
            raise CoordinatorError(message) from error
        return int(server.server_port)
