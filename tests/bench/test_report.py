"""The comparison's arithmetic: ratios, medians, promises, and what is printed."""

import pytest

from bench.serving.burst import BurstResult
from bench.serving.report import (
    check_promises,
    count_differing,
    make_row,
    median_by_system,
    show_arena,
    show_promises,
    show_side_by_side,
)
from tests.bench.results import make_completion, make_result, make_snapshot

STOCK = make_result(wall_s=4.0, calm=make_snapshot(preempted=7, tokens=100, steps=10))


def make_elastic(*, tokens: int = 200, evicted: int = 5, loaded: int = 5, preempted: int = 0) -> BurstResult:
    """An elastic burst twice as fast as STOCK."""
    return make_result(
        wall_s=2.0,
        calm=make_snapshot(
            evicted=evicted, loaded=loaded, preempted=preempted, tokens=tokens, steps=10, tpots_s=(0.005, 0.015)
        ),
    )


def test_a_row_stands_beside_stock() -> None:
    """The ratio is tokens/s over stock's of the same requests."""
    row = make_row("elasticmoe", 1, make_elastic(), STOCK)
    assert (row.tok_s, row.ratio_to_stock, row.requests_per_step, row.preemptions, row.evictions, row.loads) == (
        1.0,
        2.0,
        20,
        0,
        5,
        5,
    )
    assert (row.ttft_ms, row.tpot_ms, row.tokens_equal, row.is_calm) == (500.0, 10.0, True, True)
    assert make_row("stock", 1, STOCK, STOCK).ratio_to_stock == 1.0


def test_one_other_token_makes_a_request_differ() -> None:
    """Requests are compared in their places, whole."""
    left = make_result(completions=(make_completion((1, 2)), make_completion((3,))))
    assert count_differing(left, make_result(completions=(make_completion((1, 2)), make_completion((4,))))) == 1
    assert count_differing(left, make_result(completions=(make_completion((3,)), make_completion((1, 2))))) == 2
    row = make_row("elasticmoe", 0, make_elastic(), make_result(completions=(make_completion((1,)),)))
    assert (row.num_differing, row.tokens_equal) == (1, False)


def test_results_of_different_bursts_are_not_compared() -> None:
    """A missing request is a mistake of ours, not a difference."""
    with pytest.raises(ValueError, match="longer"):
        count_differing(STOCK, make_result(completions=(make_completion(), make_completion())))


def test_medians_are_per_system_and_a_flag_must_hold_always() -> None:
    """Three repeats: the middle number, and the and of the flags."""
    rows = [
        make_row("elasticmoe", repeat, make_elastic(tokens=tokens), STOCK)
        for repeat, tokens in enumerate((90, 300, 200))
    ]
    other = make_result(completions=(make_completion((9, 9)),), calm=make_snapshot(tokens=10, steps=10))
    median = median_by_system([*rows, make_row("stock", 0, STOCK, STOCK), make_row("stock", 1, other, STOCK)])
    assert list(median) == ["elasticmoe", "stock"]
    assert (median["elasticmoe"]["requests_per_step"], median["elasticmoe"]["tokens_equal"]) == (20, True)
    assert (median["stock"]["requests_per_step"], median["stock"]["tokens_equal"]) == (5.5, False)


@pytest.mark.parametrize(
    ("elastic", "broken"),
    [
        (make_elastic(), []),
        (make_elastic(preempted=1), ["no request was preempted"]),
        (make_elastic(evicted=0), ["experts gave their pages to requests"]),
        (make_elastic(loaded=0), ["experts came back"]),
        (make_elastic(tokens=199), ["a step serves at least 2x as many requests as stock's"]),
    ],
)
def test_each_promise_breaks_alone(elastic: BurstResult, broken: list[str]) -> None:
    """A promise depends on its own numbers only."""
    assert [one.what for one in check_promises(elastic, STOCK) if not one.holds] == broken


def test_other_tokens_break_the_first_promise() -> None:
    """And the line says how many are equal."""
    stock = make_result(completions=(make_completion((8, 8)),), calm=make_snapshot(tokens=100, steps=10))
    promise = check_promises(make_elastic(), stock)[0]
    assert not promise.holds
    assert show_promises([promise]) == "  BROKEN  the tokens are those of stock vLLM: 0 of 1 requests equal"


def test_a_stock_without_steps_breaks_the_ratio_instead_of_dividing_by_it() -> None:
    """Steps that were not counted promise nothing."""
    assert not check_promises(make_elastic(), make_result())[-1].holds


def test_the_arena_is_shown_at_three_moments_with_its_sum() -> None:
    """KiB by owner; the sum is the arena's size."""
    result = make_result(
        before=make_snapshot(resident=30),
        samples=(make_snapshot(resident=10, running=10),),
        calm=make_snapshot(resident=30),
    )
    lines = [line.split() for line in show_arena(result).splitlines()]
    assert lines == [
        ["arena,", "KiB", "expert", "kv", "sum"],
        ["before", "30", "0", "30"],
        ["at", "peak", "10", "20", "30"],
        ["after", "30", "0", "30"],
    ]


def test_both_systems_stand_side_by_side() -> None:
    """Stock has no experts to evict."""
    text = show_side_by_side(make_row("elasticmoe", 0, make_elastic(), STOCK), make_row("stock", 0, STOCK, STOCK))
    cells = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    assert cells["tokens/s"] == ["1.0", "0.5"]
    assert cells["preemptions"] == ["0", "7"]
    assert cells["experts evicted"] == ["5", "-"]
