"""TensorFlow's implementation of `hvdtrain.core.protocols.Ops`, and gradients in host memory that a transport sums.

Owns that memory. A tensor over numpy memory reads it as long as the tensor lives, and a variable that it is assigned to
keeps that memory; so a bucket has several slots, and none is written to while somebody holds a tensor of it.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.nodes import HostNodes
from hvdtrain.backends.tensorflow.placement import free_bytes
from hvdtrain.comm.compressors.base import DEPENDENT, LEAST, sample
from hvdtrain.core.buckets import ALIGNMENT
from hvdtrain.core.protocols import Array, Collectives
from hvdtrain.core.protocols.types import Bucket, itemsize


class Ops:
    """Array operations on any device TensorFlow chooses; cells on ``device``, "" leaves that open too."""

    name = "tensorflow"
    writes = False

    def __init__(self, device: str = "") -> None:
        self.device = device

    def zeros(self, n: int, dtype: str) -> Array:
        return tf.zeros([n], dtype)

    def buffer(self, n: int, dtype: str, own: np.ndarray | None = None) -> HostVector:
        """Return numpy memory, since a tensor never changes, that TensorFlow can read without a copy."""
        return (zeros(n, dtype) if own is None else own).view(HostVector)

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

    def bitcast(self, x: Array, dtype: str) -> Array:
        target = tf.as_dtype(dtype)
        if target.size > x.dtype.size:  # TensorFlow wants the bytes of one element along the last axis
            x = tf.reshape(x, [-1, target.size // x.dtype.size])
        return tf.reshape(tf.bitcast(x, target), [-1])

    def topk(self, flat_N: Array, k: int) -> tuple[Array, Array]:
        magnitude_N = tf.abs(flat_N)
        stride, place = sample(flat_N.shape[0], k)

        def of_all() -> Array:
            return _largest(magnitude_N, k)

        if place:
            least = tf.maximum(tf.math.top_k(magnitude_N[::stride], place).values[-1], LEAST)
            index_C = tf.where(magnitude_N >= least)[:, 0]
            index_k = tf.cond(tf.size(index_C) >= k,
                              lambda: tf.gather(index_C, _largest(tf.gather(magnitude_N, index_C), k)), of_all)
        else:
            index_k = of_all()
        return tf.gather(flat_N, index_k), index_k

    def take(self, flat_N: Array, index_k: Array) -> Array:
        return tf.gather(flat_N, index_k)

    def by_part(self, index_k: Array, ends_P: Sequence[int]) -> tuple[Array, Array]:
        order_k = tf.argsort(index_k)
        below_P = tf.searchsorted(tf.gather(index_k, order_k), tf.constant(ends_P, tf.int64))
        return tf.cast(order_k, tf.int64), below_P - tf.concat([[0], below_P[:-1]], 0)

    def scatter_add(self, n: int, index_k: Array, values_k: Array) -> Array:
        if index_k.shape.rank == 1:
            return tf.math.unsorted_segment_sum(values_k, index_k, n)  # several times faster than tf.scatter_nd
        result_N = self.scatter_add(n, index_k[0], values_k[0])
        for row in range(1, index_k.shape[0]):  # one after another: on a GPU the order in a call is open
            result_N = self.plus(result_N, self.scatter_add(n, index_k[row], values_k[row]))
        return result_N

    def drop(self, flat_N: Array, index_k: Array) -> Array:
        return tf.tensor_scatter_nd_update(flat_N, index_k[:, None], tf.zeros(tf.shape(index_k), flat_N.dtype))

    def matmul(self, a: Array, b: Array) -> Array:
        return tf.matmul(a, b)

    def transpose(self, a: Array) -> Array:
        return tf.transpose(a)

    def plus(self, x: Array, y: Array) -> Array:
        with tf.control_dependencies([x]):  # else TensorFlow makes one AddN of several, in an order of its own
            return x + y

    def minus_scaled(self, x: Array, y: Array, scale: float) -> Array:
        return x - scale * y

    def orthogonalize(self, m_NR: Array) -> Array:
        # Eigen, other than LAPACK, squares as it goes: magnitudes below 1e-18 would vanish, above 1e18 overflow.
        q, r = tf.linalg.qr(m_NR / (tf.reduce_max(tf.abs(m_NR)) + 1e-30))
        kept_R, length_R = tf.linalg.diag_part(r), tf.reduce_sum(tf.abs(r), axis=0)
        return q * (tf.where(tf.abs(kept_R) <= DEPENDENT * length_R, 0.0, tf.sign(kept_R)) + length_R * 0.0)

    def sum_squares(self, x: Array) -> Array:
        # l2_loss halves them; it reads x once, where square and reduce_sum write the squares to memory in between.
        return 2 * tf.nn.l2_loss(tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x)

    def total(self, scalars: Sequence[Array]) -> Array:
        total = tf.zeros([], tf.float64)
        for one in scalars:
            total += tf.cast(one, tf.float64)
        return total

    def abs_max(self, x: Array) -> Array:
        return tf.reduce_max(tf.abs(x)) if x.shape.num_elements() else tf.zeros([], x.dtype)

    def abs_max_rows(self, x_BK: Array) -> Array:
        return tf.reduce_max(tf.abs(x_BK), axis=1)

    def round(self, x: Array) -> Array:
        return tf.round(x)

    def overwrite(self, x: Array, by: Array) -> Array:
        return by

    def all_finite(self, x: Array) -> Array:
        return tf.reduce_all(tf.math.is_finite(x))

    def select(self, which: Array, x: Array, y: Array) -> Array:
        return tf.where(which, x, y)

    def cell(self, value: Array) -> VariableCell:
        return VariableCell(value, self.device)

    def compiled(self, fn: Any) -> Any:
        """Return ``fn`` as one graph, which is how an exchange runs here."""
        return tf.function(fn, jit_compile=False, autograph=False)

    def during_backward(self, wire: Collectives) -> Collectives:
        """Return the transport itself, or `HostNodes` over one that is outside of graphs."""
        return wire if wire.in_graph else HostNodes(wire)

    def free_bytes(self) -> int | None:
        """Return the free memory of the first GPU; None on the CPU."""
        return free_bytes()

    def to_host(self, x: Array) -> np.ndarray:
        """Return a copy: a collective may write into what it is given, and a tensor never changes."""
        if isinstance(x, HostVector):
            return x
        return np.array(x.numpy() if hasattr(x, "numpy") else x)

    def from_host(self, x: np.ndarray) -> Array:
        return x if isinstance(x, HostVector) else tf.convert_to_tensor(x)


class HostVector(np.ndarray):
    """Memory of `Ops.buffer`: a stage fills it, a transport sums it in place, and an update reads it."""


class VariableCell:
    """Implements `hvdtrain.core.protocols.StateCell` by a variable made outside of the graph that is being traced.

    A write gives the variable another buffer (no copy), so that what was read before stays as it was.
    """

    def __init__(self, value: Array, device: str = "") -> None:
        with tf.init_scope(), tf.device(device) if device else nullcontext():
            self.variable = tf.Variable(value, trainable=False)

    def read(self) -> Array:
        return self.variable.read_value()

    def write(self, x: Array) -> None:
        self.variable.assign(x, read_value=False)


def _largest(magnitude_C: Array, k: int) -> Array:
    """Return the places of the k largest, int64 (k,), of equals the lower index. NaN counts as infinity."""
    magnitude_C = tf.where(tf.math.is_nan(magnitude_C), tf.constant(math.inf, magnitude_C.dtype), magnitude_C)
    return tf.cast(tf.math.top_k(magnitude_C, k, sorted=False).indices, tf.int64)


SLOTS = 3
"""Of a bucket in the transport's own memory: one to fill, one still held, and one whose sums are copied out."""


def aligned(bucket: Bucket) -> Bucket:
    """Align each parameter to `ALIGNMENT` bytes, so that `Memory.tensors` copies none. Pure."""
    step = ALIGNMENT // itemsize(bucket.dtype)
    offsets, end = [], 0
    for shape in bucket.shapes:
        offsets.append(end)
        end += -(-int(np.prod(shape, dtype=np.int64)) // step) * step
    return dataclasses.replace(bucket, offsets=tuple(offsets), n=end)


def fill(flat_N: np.ndarray, bucket: Bucket, grads: Sequence[Any]) -> None:
    """Copy a gradient for each of the bucket's parameters, eager tensors on the CPU or arrays, to its place."""
    for offset, grad in zip(bucket.offsets, grads):
        own = np.asarray(grad)  # TensorFlow's own memory
        np.copyto(flat_N[offset:offset + own.size].reshape(own.shape), own)


class Memory:
    """The vectors of one bucket, in memory that ``wire`` sums in place if it has such. Collective to make.

    A step fills a `free` vector, hands it to the transport's ``allreduce`` and asks for the sum's `tensors`.
    """

    def __init__(self, wire: Collectives, bucket: Bucket) -> None:
        self.bucket = bucket
        self._slots = wire.buffers(bucket.n, bucket.dtype, SLOTS)
        self._own = not self._slots
        self._holders: dict[int, weakref.ref[np.ndarray]] = {}
        self._taken = 0

    def free(self) -> np.ndarray:
        """Return the (n,) vector to fill next, which nobody reads; its content is arbitrary, gaps are zero."""
        self._taken = next((i for i in range(len(self._slots)) if not self._held(i)), len(self._slots))
        if self._taken == len(self._slots):
            assert self._own, "the last of the transport's own slots is never held"
            self._slots.append(zeros(self.bucket.n, self.bucket.dtype))
        return self._slots[self._taken]

    def arrays(self) -> list[np.ndarray]:
        """Return the vector that `free` gave last as one array for each parameter, which share its memory."""
        if not self.bucket.n:
            return self._cut(self._slots[self._taken])
        if not self._own and self._taken == len(self._slots) - 1:
            copy_N = zeros(self.bucket.n, self.bucket.dtype)
            np.copyto(copy_N, self._slots[self._taken])
            return self._cut(copy_N)
        vector_N = np.frombuffer(self._slots[self._taken].data, self.bucket.dtype)  # what its parts keep alive
        self._holders[self._taken] = weakref.ref(vector_N)
        return self._cut(vector_N)

    def tensors(self) -> list[tf.Tensor]:
        """Return `arrays` as tensors on the CPU; only those that are not aligned are copied."""
        return [view(x) for x in self.arrays()]

    def _cut(self, vector_N: np.ndarray) -> list[np.ndarray]:
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self.bucket.shapes]
        return [vector_N[begin:begin + n].reshape(shape)
                for begin, n, shape in zip(self.bucket.offsets, sizes, self.bucket.shapes)]

    def _held(self, slot: int) -> bool:
        holder = self._holders.get(slot)
        return holder is not None and holder() is not None


def readable(x: np.ndarray) -> bool:
    """Return whether TensorFlow can read ``x`` in place; it ends the process if it tries and cannot."""
    return bool(x.size) and x.ctypes.data % ALIGNMENT == 0 and x.flags.c_contiguous


def view(x: np.ndarray) -> tf.Tensor:
    """Return a tensor on the CPU that reads the memory of ``x``, also later writes; a copy if not `readable`."""
    if not readable(x):
        return tf.convert_to_tensor(x)
    return tf.experimental.dlpack.from_dlpack(x.view(np.ndarray).__dlpack__())


def zeros(n: int, dtype: str) -> np.ndarray:
    """Return (n,) zeros at an aligned address."""
    numbers = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    raw = np.zeros(n * numbers.itemsize + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin:begin + n * numbers.itemsize].view(numbers)
