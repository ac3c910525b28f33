"""What steps may last so that who runs is not late."""

import math

import pytest

from elasticmoe.runtime.adjuster.prompt_budget import DEPTH, MOST_OWED, SHARE, PromptBudget

TPOT_S = 0.1


def spend(budget: PromptBudget, *steps_s: float) -> None:
    """Count steps beside which answers wait for their next token."""
    for step_s in steps_s:
        budget.spend(step_s, is_owed=True)


def test_a_full_budget_lets_any_step_be() -> None:
    """Else a prompt that is longer than the budget is deep would never start."""
    assert PromptBudget(TPOT_S).step_s(is_owed=True) == math.inf


def test_steps_within_their_share_leave_it_full() -> None:
    """And it never holds more, however short they are."""
    budget = PromptBudget(TPOT_S)
    spend(budget, SHARE * TPOT_S, 0.001)
    assert budget.step_s(is_owed=True) == math.inf
    assert budget.held_s == DEPTH * TPOT_S


def test_each_step_pays_in_six_tenths_of_a_tpot() -> None:
    """One that lasts as long leaves what is held, one that takes no time adds all of it; so promised, so paid in."""
    for tpot_s in (0.1, 0.4):
        budget = PromptBudget(tpot_s)
        spend(budget, 2 * tpot_s)
        held_s = budget.held_s
        spend(budget, 0.6 * tpot_s)
        assert budget.held_s == pytest.approx(held_s)
        spend(budget, 0.0)
        assert budget.held_s == pytest.approx(held_s + 0.6 * tpot_s)


def test_three_tpots_are_held() -> None:
    """A step of as many and its share empties a full budget: the next may take one; five of no time fill it again."""
    budget = PromptBudget(TPOT_S)
    spend(budget, 3.6 * TPOT_S)
    assert budget.step_s(is_owed=True) == pytest.approx(TPOT_S)
    spend(budget, *[0.0] * 4)
    assert budget.step_s(is_owed=True) == pytest.approx(3.4 * TPOT_S)
    spend(budget, 0.0, 0.0)
    assert budget.step_s(is_owed=True) == math.inf


def test_an_answer_of_ten_tokens_bears_what_is_held_beside_what_is_paid_in() -> None:
    """Its mean TPOT is within what was promised though prompts take all that they may; more of either would be late."""
    budget, lasted_s = PromptBudget(TPOT_S), 0.0
    for _ in range(10):
        step_s = min(budget.step_s(is_owed=True), DEPTH * TPOT_S)
        lasted_s += step_s
        spend(budget, step_s)
    assert 0.9 * TPOT_S <= lasted_s / 10 <= TPOT_S


@pytest.mark.parametrize("tokens", [3, 10, 100])
def test_an_answer_keeps_its_tpot_beside_steps_as_long_as_they_may_be(tokens: int) -> None:
    """They last their share on average, after what a full budget gave; no less, or prompts would wait for nothing."""
    budget, lasted_s = PromptBudget(TPOT_S), 0.0
    for _ in range(tokens):
        step_s = min(max(budget.step_s(is_owed=True), 0.01), DEPTH * TPOT_S)
        lasted_s += step_s
        spend(budget, step_s)
    assert SHARE * tokens * TPOT_S <= lasted_s <= (SHARE * tokens + DEPTH + 1) * TPOT_S


def test_a_long_step_is_paid_off_by_short_ones() -> None:
    """One of twice the depth leaves it as far below nothing as it was above; ten steps pay a tenth of it each."""
    budget = PromptBudget(TPOT_S)
    spend(budget, (2 * DEPTH + SHARE) * TPOT_S)
    assert budget.step_s(is_owed=True) == pytest.approx((1 - DEPTH) * TPOT_S)
    spend(budget, *[(SHARE - DEPTH / 10) * TPOT_S] * 10)
    assert budget.step_s(is_owed=True) == pytest.approx(TPOT_S)


def test_what_is_owed_ends_somewhere() -> None:
    """Hours of steps that are too long owe no more than seconds: who waits then waits for no answer long gone."""
    budget = PromptBudget(TPOT_S)
    spend(budget, *[0.9 * TPOT_S] * 1000)
    budget.settle(1000, 200 * TPOT_S * 1000)
    assert budget.held_s == pytest.approx(-MOST_OWED * TPOT_S)
    spend(budget, *[0.0] * math.ceil((MOST_OWED + DEPTH) / SHARE))
    assert budget.step_s(is_owed=True) == math.inf


def test_where_nobody_waits_for_a_next_token_nothing_is_owed() -> None:
    """As in the first step of a flood: what was owed is forgotten, and that step costs nothing."""
    budget = PromptBudget(TPOT_S)
    spend(budget, 2.0)
    assert budget.step_s(is_owed=True) < 0
    assert budget.step_s(is_owed=False) == math.inf, "nor has it to wait"
    budget.spend(5.0, is_owed=False)
    assert budget.step_s(is_owed=True) == math.inf
    budget.settle(2, 20.0)
    assert budget.step_s(is_owed=True) == math.inf, "nor is what it took longer than expected"


def test_what_steps_took_replaces_what_was_expected_of_them() -> None:
    """The oldest first; those that are under way keep what is expected of them."""
    budget = PromptBudget(TPOT_S)
    spend(budget, 0.2, 0.2, 0.5)
    expected_s = budget.held_s
    budget.settle(2, 0.5)
    assert budget.held_s == pytest.approx(expected_s - 0.1)
    budget.settle(1, 0.3)
    assert budget.held_s == pytest.approx(expected_s + 0.1)


def test_a_step_that_nobody_could_foresee_is_not_counted() -> None:
    """Nor put right later: before a step was measured there is nothing to compare it with."""
    budget = PromptBudget(TPOT_S)
    spend(budget, 0.3, math.nan)
    held_s = budget.held_s
    budget.settle(2, 0.9)
    assert budget.held_s == held_s
    spend(budget, 0.0)
    budget.settle(5, 0.9)
    assert budget.held_s == pytest.approx(held_s + SHARE * TPOT_S), "four of the five were never scheduled"
