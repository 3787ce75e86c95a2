"""`adasum`: gradients combined by Adasum instead of added (Maleki et al., MLSys 2021), through Horovod.

Not a compression: it moves what an uncompressed sum moves. Owns the scale only; the operation is the collectives'.
"""

from __future__ import annotations

from hvdtrain.errors import UserError
from hvdtrain.exchange.buckets import Bucket
from hvdtrain.exchange.compressors.base import Ops, Uncompressed
from hvdtrain.protocols import AllReduce, Array, Exchange


class Adasum(Uncompressed):
    """Adasum of the ranks' mean gradients, one bucket at a time.

    Gradients arrive divided by the weight of the global batch (law 1). Times P, with equal shares, they are the means
    over each rank's own samples, which is what Adasum combines: equal vectors give themselves, orthogonal ones their
    sum. Adasum(c x) = c Adasum(x), so nothing else need change. It depends on how samples are cut over ranks.
    """

    name = "adasum"
    dtypes = frozenset({"float32", "float64"})
    reductions = frozenset({"adasum"})

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """One all-reduce by Adasum; `UserError` where P is not a power of two, which Horovod's needs."""
        if size & (size - 1):
            raise UserError(f"adasum with {size} ranks", "a power of two: it combines pairs of ranks",
                            "start 2, 4, 8, ... ranks, or set exchange.adasum: false")
        return (yield AllReduce(flat_N * size, "adasum")), state
