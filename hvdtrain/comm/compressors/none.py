"""No compression: one sum of the bucket as it is."""

from __future__ import annotations

from hvdtrain import config
from hvdtrain.comm.compressors.base import Uncompressed
from hvdtrain.core.protocols import AllReduce, Array, Exchange, Ops
from hvdtrain.core.protocols.types import Bucket


class NoCompression(Uncompressed):
    """The exact sum."""

    name, numerics = "none", "exact"
    same_bits = True
    auto_order = 1
    in_place = True
    approximates = False

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        total_N = yield AllReduce(flat_N)
        return total_N, state


def make(exchange: config.ExchangeConfig) -> NoCompression:
    return NoCompression()
