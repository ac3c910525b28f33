"""Single fields: limits as numbers and shares."""

from elasticmoe.operator.spec.fields import resolve_limit


def test_a_number_is_itself() -> None:
    """However many experts there are."""
    assert resolve_limit(7, None) == 7


def test_a_share_is_of_a_layers_experts_rounded_down() -> None:
    """40 % of 128 are 51."""
    assert resolve_limit("40%", 128) == 51


def test_a_share_waits_for_the_number_of_experts() -> None:
    """Until a pod has said it."""
    assert resolve_limit("40%", None) is None
