"""Gradients of TensorFlow in host memory: into a bucket that a transport sums, and out of it without a copy.

Owns that memory. A tensor over numpy memory reads it as long as the tensor lives, and a variable that it is assigned to
keeps that memory; so a bucket has several slots, and none is written to while somebody holds a tensor of it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core.buckets import ALIGNMENT
from hvdtrain.core.protocols import Collectives
from hvdtrain.core.protocols.types import Bucket, itemsize

SLOTS = 3
"""Of a bucket in the wire's own memory: one to fill, one still held, and one whose sums are copied out."""


def aligned(bucket: Bucket) -> Bucket:
    """Align each parameter to `ALIGNMENT` bytes, so that `Memory.tensors` copies none. Pure.

    For buckets without a compressor, since those know no gaps.
    """
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

    A step takes a `free` vector, fills it, hands it to the transport's ``allreduce`` and asks for the `tensors` of the
    sum.
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
            assert self._own, "the last of the wire's own slots is never held"
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
