"""Where each expert matrix lies in the host pool: layer, then expert, then W1, W3, W2, without gaps."""

from dataclasses import dataclass

from elasticmoe.runtime.units import MATRICES, ExpertKey


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Sizes of one rank's slice of all routed experts."""

    num_layers: int
    num_experts: int
    rows: int
    """f: rows of W1 and W3, columns of W2."""
    cols: int
    """d: columns of W1 and W3, rows of W2."""
    itemsize: int

    @property
    def matrix_bytes(self) -> int:
        """Return E: one matrix."""
        return self.rows * self.cols * self.itemsize

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one expert."""
        return MATRICES * self.matrix_bytes

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of one layer's experts."""
        return self.num_experts * self.expert_bytes

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of the whole pool."""
        return self.num_layers * self.layer_bytes

    def offset(self, key: ExpertKey, matrix: int = 0) -> int:
        """Return where a matrix starts, in bytes."""
        return key.layer * self.layer_bytes + key.expert * self.expert_bytes + matrix * self.matrix_bytes
