"""Pods' metrics, read over HTTP from a small server, and from text."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from elasticmoe.operator import scrape
from elasticmoe.operator.errors import ScrapeError
from elasticmoe.operator.observed import PodSample, PoolSample
from elasticmoe.operator.scrape import fetch, metrics_url, parse, read_coordinator, read_worker, scrape_all
from tests.fakes.kube_objects import make_pod

WORKER = """\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0"} 500.0
# TYPE vllm:request_time_per_output_token_seconds histogram
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="0.05"} 3.0
vllm:request_time_per_output_token_seconds_bucket{engine="1",le="0.05"} 1.0
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="+Inf"} 5.0
# TYPE elasticmoe_expert_offload_limit gauge
elasticmoe_expert_offload_limit{kind="requested"} 20.0
elasticmoe_expert_offload_limit{kind="effective"} 16.0
# TYPE elasticmoe_resident_experts gauge
elasticmoe_resident_experts 100.0
# TYPE elasticmoe_layers_at_limit gauge
elasticmoe_layers_at_limit 4.0
# TYPE elasticmoe_exposed_fetch_seconds counter
elasticmoe_exposed_fetch_seconds_total 1.5
# TYPE elasticmoe_recovery_seconds gauge
elasticmoe_recovery_seconds 3.0
# TYPE elasticmoe_experts_per_layer gauge
elasticmoe_experts_per_layer 32.0
"""


class Page(BaseHTTPRequestHandler):
    """Answers /metrics with the worker's page, /short with less than it promises, as one whose process ends does."""

    def do_GET(self) -> None:
        """Answer."""
        body = WORKER.encode()
        self.send_response(404 if self.path == "/other" else 200)
        self.send_header("Content-Length", str(len(body) + (self.path == "/short")))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server of metrics on 127.0.0.1."""
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_workers_page_becomes_a_sample() -> None:
    """Summed over engines; limits by kind; buckets by their bound."""
    assert read_worker(parse(WORKER), at_s=9.0) == PodSample(
        at_s=9.0,
        waiting=3.0,
        generated_tokens=500.0,
        exposed_s=1.5,
        recovery_s=3.0,
        layers_at_limit=4.0,
        resident_experts=100,
        requested_limit=20,
        effective_limit=16,
        experts_per_layer=32,
        tpot_buckets={0.05: 4.0, float("inf"): 5.0},
    )


def test_what_a_page_lacks_is_not_known() -> None:
    """As with a runtime that doesn't export it yet."""
    assert read_worker(parse(""), at_s=9.0) == PodSample(9.0)


def test_a_coordinators_page_says_pool_and_leases() -> None:
    """In bytes and in workers."""
    assert read_coordinator(parse("elasticmoe_host_pool_bytes 1e9\nelasticmoe_host_pool_leases 2\n")) == PoolSample(
        10**9, 2
    )


def test_a_page_that_is_none_is_told() -> None:
    """As an HTML error page would be."""
    with pytest.raises(ScrapeError, match="want Prometheus' text format"):
        parse("<html> </html>\n")


def test_a_url_takes_both_kinds_of_address() -> None:
    """IPv6 stands in brackets."""
    assert metrics_url("10.0.0.1", 8000) == "http://10.0.0.1:8000/metrics"
    assert metrics_url("fd00::1", 9401) == "http://[fd00::1]:9401/metrics"


def test_a_pod_that_does_not_answer_is_told(port: int) -> None:
    """With the address and what came instead."""
    assert fetch(f"http://127.0.0.1:{port}/metrics") == WORKER
    with pytest.raises(ScrapeError, match=r"want metrics from .*/other, got HTTP Error 404"):
        fetch(f"http://127.0.0.1:{port}/other")


def test_a_page_that_breaks_off_is_none(port: int) -> None:
    """What it lacks would count as zero."""
    with pytest.raises(ScrapeError, match=r"IncompleteRead\(.* 1 more expected\)"):
        fetch(f"http://127.0.0.1:{port}/short")


class Clock:
    """In the place of `time`: that many seconds go by between two looks, however long they took."""

    def __init__(self, step_s: float) -> None:
        """Start at 0."""
        self.now_s, self.step_s = 0.0, step_s

    def monotonic(self) -> float:
        """Return the time."""
        self.now_s += self.step_s
        return self.now_s


def test_a_page_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk comes in time and all of them don't: a pass must not wait for it."""
    monkeypatch.setattr(scrape, "time", Clock(step_s=7.0))
    with (
        long_page(itertools.repeat(b"#\n")) as port,
        pytest.raises(ScrapeError, match=r"[1-9]\d* bytes and no end, .* in 30 s"),
    ):
        fetch(f"http://127.0.0.1:{port}/metrics", timeout_s=30.0)


def test_a_page_that_is_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its end, however fast it comes."""
    monkeypatch.setattr(scrape, "time", Clock(step_s=0.0))
    monkeypatch.setattr(scrape, "MAX_BYTES", 2**16)
    page = itertools.repeat(b"#" * 2**14, 1000)
    with long_page(page) as port, pytest.raises(ScrapeError, match="no end, of at most 65536 in 30 s"):
        fetch(f"http://127.0.0.1:{port}/metrics", timeout_s=30.0)


@contextmanager
def long_page(chunks: Iterable[bytes]) -> Iterator[int]:
    """Give the port of a server whose one answer is these chunks, or as many of them as somebody reads."""

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            for chunk in chunks:
                connection.sendall(chunk)
                time.sleep(0.001)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def test_only_ready_pods_that_answer_have_a_sample(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is starting, leaving or without an address is not asked; nobody listens on the coordinators' port."""
    monkeypatch.setattr(scrape, "WORKER_PORT", port)
    monkeypatch.setattr(scrape, "METRICS_PORT", 9)
    local = {"ip": "127.0.0.1"}
    workers = (
        make_pod("good", **local),
        make_pod("starting", is_ready=False, **local),
        make_pod("leaving", is_leaving=True, **local),
        make_pod("new", ip=None),
    )
    samples = scrape_all(workers, (make_pod("c", **local),), at_s=1.0)
    assert list(samples.workers) == ["good"]
    assert samples.workers["good"].waiting == 3.0
    assert samples.coordinators == {}
