"""What holds for every test: hypothesis' profiles, the time a real engine may take, and where GPU tests are skipped."""

import signal

import pytest
from hypothesis import HealthCheck, settings

ENGINE_TIMEOUT_S = 600.0

# 300 runs of 50 steps: a state machine takes over 10,000 in CI (--hypothesis-profile=ci), the same ones each time.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=300,
    print_blob=True,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=30, stateful_step_count=30)
settings.load_profile("dev")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as `make test &` has it, and every process that a test starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give engine tests their longer timeout; skip GPU tests, with the reason, where the GPUs are missing."""
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))
    needs = [(item, num_gpus) for item in items if (num_gpus := _count_needed_gpus(item)) > 0]
    num_found = _count_gpus() if needs else 0
    for item, num_gpus in needs:
        if num_gpus > num_found:
            item.add_marker(pytest.mark.skip(reason=f"needs {num_gpus} CUDA GPU(s), this machine has {num_found}"))


def _count_needed_gpus(item: pytest.Item) -> int:
    if item.get_closest_marker("multi_gpu"):
        return 2
    return 1 if item.get_closest_marker("gpu") else 0


def _count_gpus() -> int:
    import torch  # noqa: PLC0415  # two seconds, only paid where a GPU test was collected

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
