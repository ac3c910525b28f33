"""Reads pods' /metrics: the numbers that the autotuner and the status need, straight from each pod."""

import logging
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from http.client import HTTPException, IncompleteRead
from itertools import chain
from typing import Final, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from elasticmoe.operator.errors import ScrapeError
from elasticmoe.operator.observed import Pod, PodSample, PoolSample, Samples
from elasticmoe.runtime.contract import names
from elasticmoe.runtime.contract.labels import EXPERTS_PER_LAYER, WORKER_PORT
from elasticmoe.runtime.contract.pool_names import HOST_POOL_BYTES, HOST_POOL_LEASES, METRICS_PORT

Series = dict[str, list[Sample]]
"""A metrics page: its samples by name."""

T = TypeVar("T")

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 4.0
"""A worker under a burst answers late, and then its numbers matter most; but an edit that comes meanwhile waits."""
MAX_BYTES: Final = 16 * 2**20
_CHUNK: Final = 2**16
_AT_ONCE: Final = 8
_TPOT: Final = "vllm:request_time_per_output_token_seconds_bucket"


def scrape_all(workers: Iterable[Pod], coordinators: Iterable[Pod], at_s: float) -> Samples:
    """Return the samples of those pods that are ready and answer; of the others a line is logged. Asks several at once.

    Takes little more than TIMEOUT_S for as many pods as are asked at once, whichever of them don't answer.
    """
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        of_workers = _scrape(threads, workers, WORKER_PORT, lambda series: read_worker(series, at_s))
        of_coordinators = _scrape(threads, coordinators, METRICS_PORT, read_coordinator)
        return Samples(dict(chain(*of_workers)), dict(chain(*of_coordinators)))


def _scrape(
    threads: Executor, pods: Iterable[Pod], port: int, read: Callable[[Series], T]
) -> Iterator[list[tuple[str, T]]]:
    """Start asking each pod and return an iterator of what `read` makes of each page, with the pod's name."""

    def ask(name: str, ip: str) -> list[tuple[str, T]]:
        try:
            return [(name, read(parse(fetch(metrics_url(ip, port)))))]
        except ScrapeError as error:
            logger.info("pod %s: %s", name, error)
            return []

    asked = [(pod.name, pod.ip) for pod in pods if pod.is_ready and not pod.is_leaving and pod.ip]
    return threads.map(lambda pod: ask(*pod), asked)


def metrics_url(ip: str, port: int) -> str:
    """Return where a pod's metrics are."""
    host = f"[{ip}]" if ":" in ip else ip
    return f"http://{host}:{port}/metrics"


def fetch(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the text of a metrics page; raises ScrapeError, also for one that comes too slowly or has no end."""
    deadline_s, page = time.monotonic() + timeout_s, bytearray()
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310 -- metrics_url says http
            while chunk := response.read1(_CHUNK):
                page += chunk
                if time.monotonic() > deadline_s or len(page) > MAX_BYTES:
                    raise TimeoutError(f"{len(page)} bytes and no end, of at most {MAX_BYTES} in {timeout_s:g} s")
            if response.length:  # read1, unlike read, takes a broken connection for the end
                raise IncompleteRead(bytes(page), response.length)
        return page.decode("utf-8")
    except (OSError, HTTPException, UnicodeDecodeError) as error:
        message = f"want metrics from {url}, got {error}; asked again at the next pass"
        raise ScrapeError(message) from error


def parse(text: str) -> Series:
    """Return a metrics page's samples by name; raises ScrapeError if it is none."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        message = f"want Prometheus' text format, got {error}; asked again at the next pass"
        raise ScrapeError(message) from error
    series: Series = defaultdict(list)
    for sample in samples:
        series[sample.name].append(sample)
    return series


def read_coordinator(series: Series) -> PoolSample:
    """Return a coordinator's metrics."""
    return PoolSample(int(_total(series, HOST_POOL_BYTES)), int(_total(series, HOST_POOL_LEASES)))


def read_worker(series: Series, at_s: float) -> PodSample:
    """Return a worker's metrics."""
    return PodSample(
        at_s=at_s,
        waiting=_total(series, "vllm:num_requests_waiting"),
        generated_tokens=_total(series, "vllm:generation_tokens_total"),
        exposed_s=_total(series, names.EXPOSED_FETCH_SECONDS),
        recovery_s=_total(series, names.RECOVERY_SECONDS),
        layers_at_limit=_total(series, names.LAYERS_AT_LIMIT),
        resident_experts=_whole(series.get(names.RESIDENT_EXPERTS, ())),
        requested_limit=_whole(_of_kind(series, "requested")),
        effective_limit=_whole(_of_kind(series, "effective")),
        experts_per_layer=_whole(series.get(EXPERTS_PER_LAYER, ())),
        tpot_buckets=_buckets(series.get(_TPOT, ())),
    )


def _total(series: Series, name: str) -> float:
    return sum(sample.value for sample in series.get(name, ()))


def _of_kind(series: Series, kind: str) -> list[Sample]:
    return [sample for sample in series.get(names.OFFLOAD_LIMIT, ()) if sample.labels.get("kind") == kind]


def _whole(samples: Iterable[Sample]) -> int | None:
    return max((int(sample.value) for sample in samples), default=None)


def _buckets(samples: Iterable[Sample]) -> dict[float, float]:
    """Return a histogram's cumulative counts, summed over its other labels."""
    buckets: dict[float, float] = defaultdict(float)
    for sample in samples:
        buckets[float(sample.labels["le"])] += sample.value
    return dict(buckets)
