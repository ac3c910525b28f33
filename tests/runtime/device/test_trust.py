"""When predictions are listened to."""

from elasticmoe.runtime.device.trust import LEAST, LEAST_PREDICTED, PAUSE_STEPS, Trust


def _steps_until_tried_again(trust: Trust) -> int:
    return next(step for step in range(PAUSE_STEPS + 2) if trust.begin_step())


def test_a_predictor_that_is_mostly_right_is_always_listened_to() -> None:
    """Whatever it missed besides."""
    trust = Trust()
    for _ in range(10):
        assert trust.begin_step()
        trust.learn(LEAST_PREDICTED, round(LEAST * LEAST_PREDICTED) + 1)


def test_a_predictor_that_is_mostly_wrong_is_paused_and_tried_again() -> None:
    """As soon as there is enough to judge by, over several reports; afterwards it starts anew."""
    trust = Trust()
    for _ in range(4):
        assert trust.begin_step()
        trust.learn(LEAST_PREDICTED // 4, 0)
    assert _steps_until_tried_again(trust) == PAUSE_STEPS - 1
    trust.learn(LEAST_PREDICTED, LEAST_PREDICTED)
    assert trust.begin_step()


def test_a_few_predictions_say_nothing() -> None:
    """Not even if all of them are wrong."""
    trust = Trust()
    trust.learn(LEAST_PREDICTED - 1, 0)
    assert trust.begin_step()
