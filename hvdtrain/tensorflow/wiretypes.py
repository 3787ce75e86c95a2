"""Types on the wire: what a tensor is cast or reinterpreted as while it travels, and how it comes back.

Horovod and MPI sum no bfloat16, Horovod moves neither that nor unsigned numbers of 32 and 64 bits nor complex ones.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hvdtrain.tensorflow.errors import InvalidArgument
from hvdtrain.tensorflow.nodes import through_trace

Back = Callable[[tf.Tensor], tf.Tensor]

MOVED = {"bfloat16": tf.int16, "uint16": tf.int16, "uint32": tf.int32, "uint64": tf.int64, "complex64": tf.int64}
"""Of as many bits, and known to every wire."""

KNOWN = frozenset({"float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"})


def summable(x: tf.Tensor) -> tuple[tf.Tensor, Back]:
    """``x`` as a wire sums it: 16-bit floating point in float32, where the sum cannot overflow; and the way back."""
    dtype = x.dtype
    if dtype in (tf.float16, tf.bfloat16):
        return tf.cast(x, tf.float32), lambda y: tf.cast(y, dtype)
    if dtype in (tf.int16, tf.bool) or dtype.name not in KNOWN:
        raise through_trace(InvalidArgument(f"a sum of {dtype.name} over ranks",
                                            "floating point, int8, uint8, int32 or int64", "cast the tensor first"))
    return x, lambda y: y


def movable(x: tf.Tensor) -> tuple[tf.Tensor, Back]:
    """``x`` with its bits read as a type that every wire moves, of the same shape; and the way back."""
    dtype = x.dtype
    if dtype.name in KNOWN:
        return x, lambda y: y
    if dtype.name not in MOVED:
        raise through_trace(InvalidArgument(f"a collective of {dtype.name}", "numbers or truth values",
                                            "use hvd.broadcast_object or hvd.allgather_object for anything else"))
    return tf.bitcast(x, MOVED[dtype.name]), lambda y: tf.bitcast(y, dtype)


def differentiable(x: tf.Tensor) -> tuple[tf.Tensor, Back]:
    """``x`` as a type that every wire moves and that gradients flow through, at most of one dimension more; and the way
    back. Whole numbers as in `movable`, bfloat16 as float32, complex numbers as their two parts."""
    dtype = x.dtype
    if dtype == tf.bfloat16:
        return tf.cast(x, tf.float32), lambda y: tf.cast(y, dtype)
    if dtype.is_complex:
        return tf.stack([tf.math.real(x), tf.math.imag(x)], -1), lambda y: tf.complex(y[..., 0], y[..., 1])
    return movable(x)
