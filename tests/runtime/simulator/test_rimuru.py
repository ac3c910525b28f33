"""The Rimuru paper's case on one RTX 5090, with only what the paper leaves open fitted, and to stock alone."""

import pytest

from bench.simulation.rimuru import FITTED, PAPER, simulate


@pytest.mark.parametrize("design", PAPER)
def test_peak_and_steps_are_the_papers(design: str) -> None:
    """Within 20 %; stock, which was fitted, within 5 %."""
    assert simulate(design, FITTED).distance(PAPER[design]) < (0.05 if design == "stock" else 0.20)
