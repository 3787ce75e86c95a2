"""`bf16`: two bytes for each element, in bfloat16."""

from __future__ import annotations

from hvdtrain import config
from hvdtrain.comm.compressors.base import CompressorOps, Halves
from hvdtrain.core.protocols import Array


class Bf16(Halves):
    """bfloat16: the range of float32, relative error 2^-8."""

    name = "bf16"
    auto_order = 3

    def encode(self, ops: CompressorOps, x: Array) -> Array:
        return ops.bits16(x)

    def decode(self, ops: CompressorOps, bits: Array) -> Array:
        return ops.from_bits16(ops.reshape(bits, (-1,)))


def make(exchange: config.ExchangeConfig) -> Bf16:
    return Bf16()
