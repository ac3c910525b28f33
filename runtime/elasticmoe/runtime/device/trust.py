"""Whether to fetch on predictions: only while enough of what they bring is needed then."""

LEAST = 0.6
"""Share of the predicted experts that must be routed to: the others' copies delay those that are missed."""
LEAST_PREDICTED = 64
"""Predicted experts that a verdict rests on."""
PAUSE_STEPS = 512
"""Steps without predictions after a bad verdict; then they are tried again."""


class Trust:
    """One rank's judgement of its predictor; it changes when bytes come, never what is computed."""

    def __init__(self) -> None:
        """Start with trust."""
        self._predicted = 0
        self._foreseen = 0
        self._pause = 0

    def begin_step(self) -> bool:
        """Return whether this step's predictions are to be fetched."""
        self._pause = max(0, self._pause - 1)
        return not self._pause

    def learn(self, predicted: int, foreseen: int) -> None:
        """Take in how many experts were fetched ahead, and how many of them were routed to."""
        self._predicted += predicted
        self._foreseen += foreseen
        if self._predicted < LEAST_PREDICTED:
            return
        if self._foreseen < LEAST * self._predicted:
            self._pause = PAUSE_STEPS
        self._predicted = self._foreseen = 0
