"""Where matrices lie in the host pool."""

from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.units import ExpertKey

LAYOUT = HostLayout(num_layers=3, num_experts=4, rows=6, cols=10, itemsize=2)


def test_the_pool_is_all_matrices_without_gaps() -> None:
    """Layer, then expert, then matrix: each starts where the one before it ends."""
    offsets = [LAYOUT.offset(ExpertKey(n, e), matrix) for n in range(3) for e in range(4) for matrix in range(3)]
    assert offsets == list(range(0, LAYOUT.pool_bytes, LAYOUT.matrix_bytes))


def test_sizes() -> None:
    """A matrix is 6 · 10 · 2 bytes, an expert three of them, a layer four experts, the pool three layers."""
    assert (LAYOUT.matrix_bytes, LAYOUT.expert_bytes, LAYOUT.layer_bytes, LAYOUT.pool_bytes) == (120, 360, 1440, 4320)


def test_an_expert_starts_at_its_first_matrix() -> None:
    """Without a matrix the offset is the expert's."""
    assert LAYOUT.offset(ExpertKey(1, 2)) == 1440 + 720
