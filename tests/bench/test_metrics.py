"""Snapshots of /metrics: which series are kept, under which key."""

import concurrent.futures

import pytest

from bench.serving.errors import RequestFailed
from bench.serving.metrics import MetricsReader, Sampler, Snapshot, parse, series
from tests.fakes.openai_server import FakeOpenAIServer, Script, silent_url

TEXT = """\
# HELP elasticmoe_arena_bytes Bytes of the arena by owner.
# TYPE elasticmoe_arena_bytes gauge
elasticmoe_arena_bytes{owner="expert",pid="12"} 4096.0
elasticmoe_arena_bytes{owner="kv",pid="12"} 1024.0
elasticmoe_resident_experts 7.0
elasticmoe_adjuster_changes_total{kind="evict"} 3.0
vllm:num_requests_running{engine="0",model_name="tiny"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 1.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 40.0
vllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="tiny"} 3.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 4.0
vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 90.0
vllm:request_time_per_output_token_seconds_count{engine="0",model_name="tiny"} 2.0
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="tiny"} 0.5
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7e9
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="tiny"} 9.0
"""


def test_a_snapshot_keeps_what_a_bench_reads() -> None:
    """Labels that never differ are dropped, and so is every other series."""
    assert parse(TEXT, 1.5) == Snapshot(
        1.5,
        {
            'elasticmoe_arena_bytes{owner="expert"}': 4096.0,
            'elasticmoe_arena_bytes{owner="kv"}': 1024.0,
            "elasticmoe_resident_experts": 7.0,
            'elasticmoe_adjuster_changes_total{kind="evict"}': 3.0,
            "vllm:num_requests_running": 5.0,
            "vllm:num_preemptions_total": 1.0,
            "vllm:generation_tokens_total": 40.0,
            "vllm:iteration_tokens_total_count": 4.0,
            "vllm:request_time_per_output_token_seconds_count": 2.0,
            "vllm:request_time_per_output_token_seconds_sum": 0.5,
        },
    )


def test_a_series_is_found_by_name_and_labels() -> None:
    """One that the server lacks is 0."""
    snapshot = parse(TEXT, 0)
    assert snapshot.get("elasticmoe_arena_bytes", owner="kv") == 1024
    assert snapshot.get("elasticmoe_arena_bytes", owner="ssm") == 0
    assert snapshot.arena() == {"expert": 4096, "kv": 1024}
    assert parse("", 0).arena() == {}


def test_a_key_orders_its_labels() -> None:
    """The key doesn't depend on the order in which labels are given."""
    assert series("x", b="2", a="1") == series("x", a="1", b="2") == 'x{a="1",b="2"}'


def test_the_sampler_samples_until_its_block_ends() -> None:
    """Snapshots come in order of time, however busy the block is."""
    with (
        FakeOpenAIServer(Script(metrics=TEXT)) as server,
        MetricsReader(server.base_url) as reader,
        Sampler(reader, 0.01) as sampler,
    ):
        while len(sampler.samples) < 3:
            pass
    times = [one.at_s for one in sampler.samples]
    assert times == sorted(times)
    assert {one.get("vllm:num_requests_running") for one in sampler.samples} == {5}


def test_a_read_that_fails_is_told_when_the_block_ends() -> None:
    """A server that went away doesn't pass for one without load."""
    with silent_url() as base_url, MetricsReader(base_url) as reader:
        sampler = Sampler(reader, 0.01)
        with pytest.raises(RequestFailed, match="wanted the server's /metrics"), sampler:
            wait_ended(sampler)


def wait_ended(sampler: Sampler) -> None:
    """Return when it samples no more."""
    assert sampler._sampling is not None
    concurrent.futures.wait([sampler._sampling])
