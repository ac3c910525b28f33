"""The routing of a simulated model, against the published skew and against plain counting."""

import numpy as np
import pytest

from elasticmoe.runtime.simulator.routing import make_routing

SHAPE = (48, 128, 8)


def tokens(groups: int, each: float) -> np.ndarray:
    """Return a batch with as many tokens of each group."""
    return np.full(groups, each)


@pytest.mark.parametrize(("share", "drawn"), [(0.10, 0.43), (0.25, 0.70), (0.50, 0.91)])
def test_skew_is_the_published_one(share: float, drawn: float) -> None:
    """The top 10/25/50 % of experts draw 43/70/91 % of the selections, within 4 points."""
    routing = make_routing("skewed", *SHAPE)
    counts = np.sort(routing.expected_counts(tokens(routing.num_groups, 1.0)), axis=1)[:, ::-1]
    top = counts[:, : round(share * 128)].sum() / counts.sum()
    assert top == pytest.approx(drawn, abs=0.04)


@pytest.mark.parametrize("name", ["flat", "skewed"])
def test_a_token_selects_top_k(name: str) -> None:
    """The chances of a layer's experts sum to top_k, for every group."""
    routing = make_routing(name, *SHAPE)  # type: ignore[arg-type]
    sums = routing.selected.reshape(-1, 48, 128).sum(axis=2)
    assert sums == pytest.approx(np.full_like(sums, 8), rel=2e-3)


@pytest.mark.parametrize(("batch", "touched"), [(1, 8.0), (8, 51.6), (32, 111.8), (64, 125.9)])
def test_flat_routing_touches_what_counting_says(batch: int, touched: float) -> None:
    """128 (1 - (1 - 8/128)^B) experts a layer."""
    routing = make_routing("flat", *SHAPE)
    assert routing.touched(tokens(1, batch)).reshape(48, 128).sum(axis=1).mean() == pytest.approx(touched, rel=0.001)


def test_one_token_touches_what_it_selects() -> None:
    """With one token the chance to be touched is the chance to be selected."""
    routing = make_routing("skewed", 2, 16, 2)
    one = np.zeros(routing.num_groups)
    one[3] = 1
    assert routing.touched(one) == pytest.approx(routing.selected[3], abs=1e-5)


def test_a_seed_gives_the_same_routing() -> None:
    """Same seed, same model; another seed, another one."""
    first, again, other = (make_routing("skewed", 2, 16, 2, seed) for seed in (1, 1, 2))
    assert (first.selected == again.selected).all()
    assert (first.selected != other.selected).any()
