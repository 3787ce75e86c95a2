"""`Compression`: how gradients travel, by Horovod's names (none, fp16) and those of this project's compressors.

Owns the casts of TensorFlow's tensors; the classes are `hvdtrain.comm.compression`'s.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.comm import compression
from hvdtrain.comm.compression import Compressor, NoneCompressor, PowerSGDCompressor, TopKCompressor


class _Cast(Compressor):
    """Floating point travels as ``narrow``, all else as it is."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        dtype = tf.as_dtype(tensor.dtype)
        return (tf.cast(tensor, cls.narrow) if dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx) if tf.as_dtype(ctx).is_floating else tensor


class FP16Compressor(_Cast):
    """Half precision. In a gradient exchange the sum itself is made in float32."""

    project, narrow = "fp16", tf.float16


class BF16Compressor(_Cast):
    """bfloat16: half the bytes, the range of float32. In a gradient exchange the sum itself is made in float32."""

    project, narrow = "bf16", tf.bfloat16


class Compression:
    """Horovod's name for the compressors below, and for each other compressor of this project."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    topk = TopKCompressor
    powersgd = PowerSGDCompressor


compression.add_others(Compression)
