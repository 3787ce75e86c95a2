"""`adasum`: gradients combined by Adasum instead of added (Maleki et al., MLSys 2021), through Horovod.

Not a compression: it moves what an uncompressed sum moves. The operation is the collectives'.
"""

from __future__ import annotations

from hvdtrain import config
from hvdtrain.comm.compressors.base import CompressorOps, Uncompressed
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import AllReduce, Array, Exchange
from hvdtrain.core.protocols.types import Bucket


class Adasum(Uncompressed):
    """Adasum of the ranks' mean gradients, one bucket at a time.

    Adasum combines the means over each rank's own samples (``own_mean``): equal vectors give themselves, orthogonal
    ones their sum, and a rank without samples, whose vector is zero, changes nothing. Unlike law 1's sum it depends on
    how samples are partitioned over ranks, and knows no weights.
    """

    name = "adasum"
    dtypes = frozenset({"float32", "float64"})
    reductions = frozenset({"adasum"})
    own_mean = True
    own_key = "exchange.adasum"
    approximates = False
    pairs_ranks = True

    def exchange(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """Raise `UserError` where P is not a power of two, which Horovod's Adasum needs."""
        if size & (size - 1):
            raise UserError(f"adasum with {size} ranks", "a power of two: Adasum combines pairs of ranks",
                            "start 2, 4, 8, ... ranks, or set exchange.adasum: false")
        return (yield AllReduce(flat_N, "adasum")), state


def make(exchange: config.ExchangeConfig) -> Adasum:
    return Adasum()
