"""No compression: one sum of the bucket as it is."""

from __future__ import annotations

from hvdtrain.exchange.buckets import itemsize
from hvdtrain.protocols import AllReduce, Array, Exchange, Ops


class NoCompression:
    """The exact sum; ``itemsize`` is that of the bucket's dtype (bytes)."""

    name = "none"

    def __init__(self, dtype: str = "float32") -> None:
        self.itemsize = itemsize(dtype)

    def init(self, ops: Ops, n: int) -> dict[str, Array]:
        """No state."""
        return {}

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], size: int) -> Exchange:
        """One all-reduce."""
        total_N = yield AllReduce(flat_N)
        return total_N, state

    def wire_bytes(self, n: int, size: int) -> int:
        """Ring all-reduce: each rank sends 2 (P-1)/P of the vector, rounded up (Patarasuk and Yuan 2009)."""
        return -(-2 * (size - 1) * n * self.itemsize // size)
