"""TensorFlow's implementation of `hvdtrain.protocols.Ops`; the same code runs eagerly and while a graph is traced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.protocols import Array


class Ops:
    """Array operations on whichever device TensorFlow places them."""

    name = "tensorflow"

    def zeros(self, n: int, dtype: str) -> Array:
        return tf.zeros([n], dtype)

    def cast(self, x: Array, dtype: str) -> Array:
        return tf.cast(x, dtype)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return tf.reshape(x, tuple(shape))

    def pack(self, xs: Sequence[Array]) -> Array:
        flats = [tf.reshape(x, [-1]) for x in xs]
        return flats[0] if len(flats) == 1 else tf.concat(flats, 0)

    def unpack(self, flat_N: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        sizes = [int(np.prod(s, dtype=np.int64)) for s in shapes]
        ends = np.cumsum(sizes)
        # A slice along the first dimension shares its memory with the vector where alignment allows.
        return [tf.reshape(tf.slice(flat_N, [int(end) - n], [n]), tuple(s)) for s, n, end in zip(shapes, sizes, ends)]

    def bits16(self, x: Array) -> Array:
        return tf.bitcast(tf.cast(x, tf.bfloat16), tf.int16)

    def from_bits16(self, bits: Array) -> Array:
        return tf.cast(tf.bitcast(bits, tf.bfloat16), tf.float32)

    def topk(self, flat_N: Array, k: int) -> tuple[Array, Array]:
        # A stable sort keeps ties in index order on every device.
        index_k = tf.argsort(tf.abs(flat_N), direction="DESCENDING", stable=True)[:k]
        return tf.gather(flat_N, index_k), tf.cast(index_k, tf.int64)

    def take(self, flat_N: Array, index_k: Array) -> Array:
        return tf.gather(flat_N, index_k)

    def scatter_add(self, n: int, index_k: Array, values_k: Array) -> Array:
        return tf.scatter_nd(tf.cast(index_k, tf.int64)[:, None], values_k, tf.constant([n], tf.int64))

    def matmul(self, a: Array, b: Array) -> Array:
        return tf.matmul(a, b)

    def transpose(self, a: Array) -> Array:
        return tf.transpose(a)

    def orthogonalize(self, m_NR: Array) -> Array:
        columns: list[Array] = []
        for r in range(m_NR.shape[1]):
            c = m_NR[:, r]
            for q in columns:
                c = c - tf.reduce_sum(q * c) * q
            columns.append(c / (tf.norm(c) + 1e-8))
        return tf.stack(columns, axis=1)

    def sum_squares(self, x: Array) -> Array:
        return tf.reduce_sum(tf.square(tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x))

    def abs_max(self, x: Array) -> Array:
        return tf.reduce_max(tf.abs(x)) if x.shape.num_elements() else tf.zeros([], x.dtype)

    def round(self, x: Array) -> Array:
        return tf.round(x)

    def all_finite(self, x: Array) -> Array:
        return tf.reduce_all(tf.math.is_finite(x))

    def to_host(self, x: Array) -> np.ndarray:
        """A copy: a collective may write into what it is given, and a tensor never changes."""
        return np.array(x)

    def from_host(self, x: np.ndarray) -> Array:
        return tf.convert_to_tensor(x)
