"""`Compression`: how gradients travel, by Horovod's names (none, fp16) and those of this project's compressors.

Owns the casts of PyTorch's tensors; the classes are `hvdtrain.comm.compression`'s.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.comm import compression
from hvdtrain.comm.compression import Compressor, NoneCompressor, PowerSGDCompressor, TopKCompressor


class _Cast(Compressor):
    """Floating point travels as ``narrow``, all else as it is."""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.narrow) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_Cast):
    """Half precision: half the bytes. `DistributedOptimizer` makes the sum itself in float32 in shared memory; sums
    above 65504 overflow.
    """

    project, narrow = "fp16", torch.float16


class BF16Compressor(_Cast):
    """bfloat16: 8 bits of precision, the range of float32. Over Horovod a single tensor travels as float32, rounded."""

    project, narrow = "bf16", torch.bfloat16


class Compression:
    """Horovod's name for the compressors below, and for each other compressor of this project."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    topk = TopKCompressor
    powersgd = PowerSGDCompressor


compression.add_others(Compression)
