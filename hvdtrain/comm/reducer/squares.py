"""The squares of summed gradients: one number tells their global norm, and whether any of them is not finite.

Every rank holds the same sums, so each squares only its own part of them; the parts add up in the step's vote. A NaN or
an infinity anywhere makes the total NaN or infinite, and so does a gradient whose square overflows: no update is made
with that one either, as with any whose norm cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.core.protocols import Array, Ops
from hvdtrain.core.protocols.types import Bucket

ALIGN = 64
"""Elements: a slice from one multiple of them to another is a view in TensorFlow too, which copies any other."""


def own_part(n: int, rank: int, size: int) -> slice:
    """The part of ``n`` elements that ``rank`` of ``size`` looks at; together the parts are all of them, once.

    >>> own_part(200, 0, 2), own_part(200, 1, 2)
    (slice(0, 64, None), slice(64, 200, None))
    """
    def edge(r: int) -> int:
        return n if r == size else n * r // size // ALIGN * ALIGN

    return slice(edge(rank), edge(rank + 1))


def sum_squares(ops: Ops, tensors: Sequence[Array]) -> Array:
    """Return the float64 sum of the squares of all elements of ``tensors``, of any shapes."""
    total = ops.zeros(1, "float64")[0]
    for x in tensors:
        total = total + ops.cast(ops.sum_squares(x), "float64")
    return total


def own_parts(tensors: Sequence[Array], buckets: Sequence[Bucket], rank: int, size: int) -> Iterator[Array]:
    """Yield this rank's part of the sums of ``buckets``, vectors (n,) that all ranks hold alike.

    For one rank ``tensors`` are yielded as they are, whatever they are.
    """
    if size == 1:
        yield from tensors
        return
    for x, bucket in zip(tensors, buckets):
        part = own_part(bucket.n, rank, size)  # inside a graph the tensor itself may not know its length
        aligned = part.stop // ALIGN * ALIGN  # the last rank's part may end elsewhere
        for piece in (slice(part.start, aligned), slice(aligned, part.stop)):
            if piece.start < piece.stop:
                yield x[piece]
