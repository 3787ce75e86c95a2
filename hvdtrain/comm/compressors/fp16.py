"""`fp16`: two bytes for each element, in IEEE half precision."""

from __future__ import annotations

from hvdtrain import config
from hvdtrain.comm.compressors.base import CompressorOps, Halves
from hvdtrain.core.protocols import Array


class Fp16(Halves):
    """IEEE half precision: relative error 2^-11 between 6e-5 and 65504.

    Smaller gradients lose digits and vanish below 3e-8, larger ones become infinite (which is seen): bf16 keeps the
    range. Gradients here are divided by the global weight, so small ones are common.
    """

    name = "fp16"
    auto_order = 2

    def encode(self, ops: CompressorOps, x: Array) -> Array:
        half = ops.cast(x, "float16")
        return ops.reshape(ops.bitcast(ops.reshape(half, (-1,)), "int16"), half.shape)

    def decode(self, ops: CompressorOps, bits: Array) -> Array:
        return ops.cast(ops.bitcast(ops.reshape(bits, (-1,)), "float16"), "float32")


def make(exchange: config.ExchangeConfig) -> Fp16:
    return Fp16()
