"""What steps may last so that who runs is not late."""

import math

import pytest

from elasticmoe.runtime.adjuster.prompt_budget import GUESS, LONGEST, REMEMBERED, SHARE, PromptBudget

TPOT_S = 0.1


def spend(budget: PromptBudget, *steps_s: float) -> None:
    """Count steps beside which answers wait for their next token."""
    for step_s in steps_s:
        budget.spend(step_s, is_owed=True)


def left_s(budget: PromptBudget) -> float:
    """Return what the next step may take, computing some prompt already."""
    return budget.step_s(is_owed=True, has_prompt=True)


def test_where_no_step_was_long_the_first_prompt_may_be() -> None:
    """Else one that is longer than the window would never start; a second one in the same step has what is left."""
    budget = PromptBudget(TPOT_S)
    spend(budget, *[TPOT_S / 10] * 15)
    assert budget.step_s(is_owed=True) == math.inf
    assert left_s(budget) == pytest.approx((SHARE * GUESS - 1.5) * TPOT_S)
    spend(budget, 0.99 * TPOT_S)
    assert budget.step_s(is_owed=True) == math.inf, "longer than its share, but no answer is late by it"
    spend(budget, 1.01 * TPOT_S)
    assert budget.step_s(is_owed=True) == left_s(budget) == pytest.approx((SHARE * GUESS - 1.3 - 2.0) * TPOT_S)


def test_a_window_lasts_its_share_of_what_is_promised() -> None:
    """Whatever was before it is owed to answers that have ended; what a long step took is back once it has left."""
    for tpot_s in (0.1, 0.4):
        budget = PromptBudget(tpot_s)
        spend(budget, 9.0, 3 * tpot_s, *[0.0] * (GUESS - 2))
        assert left_s(budget) == pytest.approx((0.7 * GUESS - 3) * tpot_s)
        assert budget.step_s(is_owed=True) < math.inf, "the longest step is as long ago as an answer has steps"
        spend(budget, 0.0)
        assert left_s(budget) == pytest.approx(0.7 * GUESS * tpot_s)


def test_a_long_step_is_forgotten_after_as_many_as_a_short_answer_has() -> None:
    """The first prompt may be long again once no answer of the window's length saw that step."""
    budget = PromptBudget(TPOT_S)
    budget.learn([5] * 10)
    spend(budget, 9.0, *[0.0] * 3)
    assert budget.step_s(is_owed=True) < math.inf
    spend(budget, 0.0)
    assert budget.step_s(is_owed=True) == math.inf


@pytest.mark.parametrize("tokens", [4, 9, 33])
def test_an_answer_keeps_its_tpot_beside_steps_as_long_as_they_may_be(tokens: int) -> None:
    """The shortest one, whenever it starts; steps take all of its share, or prompts would wait for nothing."""
    budget, steps = PromptBudget(TPOT_S), []
    budget.learn([tokens] * 10)
    for _ in range(100):
        steps.append(max(0.01, min(left_s(budget), 3 * TPOT_S)))
        spend(budget, steps[-1])
    windows = [sum(steps[at : at + budget.window]) for at in range(50, 90)]
    assert max(windows) == pytest.approx(SHARE * (tokens - 1) * TPOT_S, abs=0.01 * tokens)


def test_the_shortest_hundredth_of_the_answers_says_how_long_a_window_is() -> None:
    """Steps after the first token; two at least, and no more than are remembered."""
    budget = PromptBudget(TPOT_S)
    budget.learn([1] * 50)
    assert budget.window == GUESS, "an answer of one token waits for no next one"
    budget.learn([200])
    assert budget.window == LONGEST
    budget.learn([9])
    assert budget.window == GUESS
    budget.learn([7])
    assert budget.window == 8
    budget.learn([300] * 196)
    assert budget.window == GUESS, "the third of two hundred, one of which is guessed"
    budget.learn([300] * 101)
    assert budget.window == LONGEST
    budget.learn([2] * 9)
    assert budget.window == 2


def test_answers_long_gone_are_forgotten() -> None:
    """What is asked changes."""
    budget = PromptBudget(TPOT_S)
    budget.learn([5] * REMEMBERED)
    assert budget.window == 4
    budget.learn([30] * REMEMBERED)
    assert budget.window == 29


def test_where_nobody_waits_for_a_next_token_nothing_is_owed() -> None:
    """As in the first step of a flood: what was before is forgotten, and that step costs nothing."""
    budget = PromptBudget(TPOT_S)
    spend(budget, 2.0)
    assert budget.step_s(is_owed=True) < 0
    assert budget.step_s(is_owed=False, has_prompt=True) == math.inf, "nor has it to wait"
    budget.spend(5.0, is_owed=False)
    assert left_s(budget) == pytest.approx(SHARE * GUESS * TPOT_S)
    budget.settle(2, 20.0)
    assert budget.step_s(is_owed=True) == math.inf, "nor is what it took longer than expected"


def test_what_steps_took_replaces_what_was_expected_of_them() -> None:
    """The oldest first, by as much each; those that are under way keep what is expected of them."""
    budget = PromptBudget(TPOT_S)
    spend(budget, 0.2, 0.2, 0.5)
    expected_s = left_s(budget)
    budget.settle(2, 0.5)
    assert left_s(budget) == pytest.approx(expected_s - 0.1)
    budget.settle(1, 0.3)
    assert left_s(budget) == pytest.approx(expected_s + 0.1)
    spend(budget, *[0.0] * (GUESS - 4))
    assert left_s(budget) == pytest.approx(expected_s + 0.1)
    spend(budget, 0.0)
    assert left_s(budget) == pytest.approx(expected_s + 0.1 + 0.25)


def test_a_step_that_nobody_could_foresee_is_not_counted() -> None:
    """Nor put right later: before a step was measured there is nothing to compare it with."""
    budget = PromptBudget(TPOT_S)
    spend(budget, 0.3, math.nan)
    before_s = left_s(budget)
    budget.settle(2, 0.9)
    assert left_s(budget) == before_s
    spend(budget, 0.1)
    budget.settle(5, 0.9)
    assert left_s(budget) == pytest.approx(before_s - 0.1), "four of the five were never scheduled"
