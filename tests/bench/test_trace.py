"""Request lengths: drawn from the trace, the same for the same seed, within the context."""

import pytest

from bench.serving.errors import BadScenario
from bench.serving.trace import (
    NUM_RESERVED_IDS,
    Lengths,
    Scaling,
    draw_lengths,
    make_requests,
    mean_lengths,
    read_trace,
    scale,
)

WIDE = Scaling(prompt=0.1, output=0.2, max_model_len=10_000)
NARROW = Scaling(prompt=0.1, output=0.2, max_model_len=64)


def test_the_trace_is_whole() -> None:
    """The file has the published number of requests and means."""
    trace = read_trace()
    prompt, output = mean_lengths(trace)
    assert (len(trace), round(prompt, 1), round(output, 1)) == (19_366, 1154.7, 211.1)


def test_a_seed_draws_the_same_again_and_another_seed_does_not() -> None:
    """Drawing is a function of the seed."""
    trace = read_trace()
    assert draw_lengths(trace, 48, 1, NARROW) == draw_lengths(trace, 48, 1, NARROW)
    assert draw_lengths(trace, 48, 1, NARROW) != draw_lengths(trace, 48, 2, NARROW)


def test_the_mean_follows_the_trace() -> None:
    """Of many draws the means are the trace's times the factors."""
    prompt, output = mean_lengths(draw_lengths(read_trace(), 10_000, 0, WIDE))
    assert prompt == pytest.approx(115.5, rel=0.03)
    assert output == pytest.approx(42.2, rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_every_request_fits_the_context(seed: int) -> None:
    """Prompt and output have their least lengths and together fit."""
    for one in draw_lengths(read_trace(), 1000, seed, NARROW):
        assert one.prompt_tokens >= NARROW.min_tokens
        assert one.output_tokens >= NARROW.min_tokens
        assert one.total_tokens <= NARROW.max_model_len


def test_a_prompt_gives_way_before_an_output() -> None:
    """A request that is too long loses prompt tokens first."""
    assert scale(Lengths(10_000, 200), NARROW) == Lengths(24, 40)
    assert scale(Lengths(10_000, 10_000), NARROW) == Lengths(4, 60)
    assert scale(Lengths(1, 1), NARROW) == Lengths(4, 4)


def test_too_many_requests_or_too_short_a_context_are_refused() -> None:
    """The message has both numbers."""
    with pytest.raises(BadScenario, match="wanted 3 requests, the trace has 1"):
        draw_lengths([Lengths(1, 1)], 3, 0, WIDE)
    with pytest.raises(BadScenario, match="wanted 4 tokens each way, the context holds 7"):
        draw_lengths([Lengths(1, 1)], 1, 0, Scaling(1, 1, max_model_len=7))


def test_prompts_have_their_lengths_and_no_special_token() -> None:
    """Ids lie in the vocabulary above the reserved ones, and follow the seed."""
    lengths = (Lengths(500, 3), Lengths(7, 9))
    requests = make_requests(lengths, 32, 0)
    assert [(len(one.prompt_ids), one.max_tokens) for one in requests] == [(500, 3), (7, 9)]
    assert {token for one in requests for token in one.prompt_ids} == set(range(NUM_RESERVED_IDS, 32))
    assert requests == make_requests(lengths, 32, 0) != make_requests(lengths, 32, 1)
