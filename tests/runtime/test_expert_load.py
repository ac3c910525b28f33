"""Counts that fade, the ranking, and profile files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.expert_load import ExpertLoad, log_spared, read_profile


def test_nothing_known_is_all_equal_and_lower_ids_rank_first() -> None:
    """Every expert is equally likely at start; ties rank the lower id first."""
    load = ExpertLoad(2, 4, half_life_tokens=100, top_k=1)
    assert load.probability.tolist() == [[0.25] * 4] * 2
    assert load.ranking.tolist() == [[0, 1, 2, 3]] * 2


def test_the_ranking_follows_the_counts_hottest_first() -> None:
    """More tokens rank higher, equal ones by id, each layer for itself."""
    load = ExpertLoad(2, 4, half_life_tokens=100, top_k=2)
    load.add(np.array([[1, 5, 5, 1], [0, 0, 0, 4]]))
    assert load.ranking.tolist() == [[1, 2, 0, 3], [3, 0, 1, 2]]
    assert load.probability[1].tolist() == [0, 0, 0, 1]


def test_a_token_spares_an_expert_as_often_as_it_is_not_among_its_top_k() -> None:
    """An expert that draws a quarter of what tokens choose, two each, is spared by half of them.

    Of the i-th coldest experts of both layers the mean share counts.
    """
    load = ExpertLoad(2, 4, half_life_tokens=100, top_k=2)
    load.add(np.array([[8, 0, 4, 4], [4, 4, 4, 4]]))
    assert np.exp(load.spared).tolist() == pytest.approx(np.array([[0, 1, 0.5, 0.5], [0.5] * 4]), abs=1e-8)
    assert np.exp(load.coldest_spared).tolist() == pytest.approx([0.75, 0.5, 0.5, 0.25])
    load.add(np.array([[0, 10**6, 0, 0], [0, 0, 0, 0]]))
    assert np.exp(load.spared[0]).tolist() == pytest.approx([1, 0, 1, 1], abs=1e-4)


def test_an_expert_that_every_token_wants_is_spared_by_next_to_none() -> None:
    """Its log stays a number."""
    assert log_spared(1.0) == log_spared(3.0) == pytest.approx(np.log(1e-9))


def test_a_layer_without_tokens_stays_as_it_was() -> None:
    """No tokens, no fading: a layer that saw none keeps what it knew."""
    load = ExpertLoad(2, 2, half_life_tokens=1, top_k=1)
    load.add(np.array([[0, 3], [0, 0]]))
    load.add(np.array([[0, 0], [0, 0]]))
    assert load.probability.tolist() == [[0, 1], [0.5, 0.5]]


def test_counts_halve_in_a_half_life_of_tokens() -> None:
    """After 100 more tokens (200 choices of two experts each) the old 64 choices weigh 32."""
    load = ExpertLoad(1, 3, half_life_tokens=100, top_k=2)
    load.add(np.array([[64, 0, 0]]))
    load.add(np.array([[0, 200, 0]]))
    assert load.probability[0].tolist() == pytest.approx([32 / 232, 200 / 232, 0])


def test_totals_do_not_fade() -> None:
    """What was counted since start adds up, whatever the half-life; a profile is not counted."""
    load = ExpertLoad(1, 2, half_life_tokens=1, top_k=1)
    load.seed(np.array([[5.0, 5.0]]))
    for _ in range(3):
        load.add(np.array([[100, 1]]))
    assert load.total.tolist() == [[300, 3]]


def test_a_shift_in_traffic_reranks_within_a_few_half_lives() -> None:
    """A long past on one expert is outweighed by one half-life on another."""
    load = ExpertLoad(1, 2, half_life_tokens=1000, top_k=1)
    for _ in range(50):
        load.add(np.array([[1000, 0]]))
    for _ in range(2):
        load.add(np.array([[0, 1000]]))
    assert load.ranking.tolist() == [[1, 0]]


def test_a_profile_is_worth_one_half_life() -> None:
    """Half as many tokens as a half-life, all on another expert, don't outweigh a profile; two half-lives do."""
    load = ExpertLoad(1, 2, half_life_tokens=1000, top_k=1)
    load.seed(np.array([[1.0, 0.0]]))
    load.add(np.array([[0, 500]]))
    assert load.ranking.tolist() == [[0, 1]]
    load.add(np.array([[0, 2000]]))
    assert load.ranking.tolist() == [[1, 0]]


def test_only_the_shares_of_a_profile_count() -> None:
    """Counts of millions and shares that sum to one half say the same; a layer without counts is all equal."""
    large, small = (ExpertLoad(2, 2, half_life_tokens=10, top_k=1) for _ in range(2))
    large.seed(np.array([[3e6, 1e6], [0, 0]]))
    small.seed(np.array([[0.375, 0.125], [0, 0]]))
    for load in (large, small):
        load.add(np.array([[0, 10], [0, 0]]))
    assert large.probability.tolist() == small.probability.tolist()
    assert small.probability[1].tolist() == [0.5, 0.5]


def write(tmp_path: Path, content: Any) -> Path:  # noqa: ANN401 -- any JSON
    """Return a profile file with this content, text as it is."""
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_profile_file_is_a_table_of_counts(tmp_path: Path) -> None:
    """`{"counts": [[...], ...]}` comes back as [layers, experts]."""
    path = write(tmp_path, {"counts": [[1, 2, 0], [4, 5.5, 6]]})
    assert read_profile(path, 2, 3).tolist() == [[1, 2, 0], [4, 5.5, 6]]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1, 2]",
        "null",
        {"count": [[1, 2], [3, 4]]},
        {"counts": [[1, 2], [3]]},
        {"counts": [[1, 2], ["a", "b"]]},
        {"counts": {"0": [1, 2]}},
        "[" * 100_000,
        {"counts": [[1, 2], [3, 10**400]]},
    ],
)
def test_a_malformed_profile_is_refused_by_its_path(tmp_path: Path, content: Any) -> None:  # noqa: ANN401 -- any JSON
    """What is not JSON with a table `counts` of numbers can't be read."""
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=rf"profile {path}: want JSON with a table `counts`, but it can't be read \("):
        read_profile(path, 2, 2)


def test_a_missing_profile_is_refused_by_its_path(tmp_path: Path) -> None:
    """No file, no start."""
    with pytest.raises(ConfigError, match=r"nowhere\.json: want JSON .* No such file"):
        read_profile(tmp_path / "nowhere.json", 2, 2)


def test_a_profile_in_no_text_encoding_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 can't be read."""
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read"):
        read_profile(path, 2, 2)


@pytest.mark.parametrize("counts", [[[1, 2]], [[1, 2, 3], [4, 5, 6]], [1, 2], [], 7])
def test_a_profile_of_another_model_is_refused_with_both_shapes(tmp_path: Path, counts: Any) -> None:  # noqa: ANN401
    """The shape must be the model's."""
    path = write(tmp_path, {"counts": counts})
    with pytest.raises(ConfigError, match=r"want 2 layers of 2 counts for this model, it has a table of shape \("):
        read_profile(path, 2, 2)


@pytest.mark.parametrize(("wrong", "text"), [(-1, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf"), (None, "nan")])
def test_counts_that_count_nothing_are_refused(tmp_path: Path, wrong: float | None, text: str) -> None:
    """Negative, missing and infinite counts are named."""
    path = write(tmp_path, {"counts": [[1, 2], [3, wrong]]})
    with pytest.raises(ConfigError, match=f"want counts >= 0, it holds {text}"):
        read_profile(path, 2, 2)
