"""Dense gradients over memory that the ranks of one host share: a node of a graph, in place of Horovod's operations.

Owns when that is to be had and the node. The sum is `hvdtrain.comm.collectives.shared`'s, the memory
`hvdtrain.backends.tensorflow.host`'s. The node copies each gradient once, into memory that all ranks see, sums there
and gives back tensors over the same memory.

It blocks the thread that runs it until every rank is there. No rank can wait inside another collective for that: those
of Horovod give their thread back while they wait, and all of this kind take turns.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.host import Memory, aligned, fill
from hvdtrain.cluster import boot, horovod
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Bucket

if TYPE_CHECKING:
    from hvdtrain.comm.collectives.shared import SharedCollectives

KEY = "HVDTRAIN_COLLECTIVES"
"""Environment variable; anything but "auto" and "shared" leaves all gradients to Horovod."""
DTYPES = frozenset({"float32", "float64"})
SMALL = 1 << 14
"""Elements below which gradients travel as one vector: a tensor of its own costs more than to copy it once more."""

_failures: list[BaseException] = []


def open_near(control: Control) -> SharedCollectives | None:
    """The wire over shared memory; None where not all ranks are CPUs of one host that share it. Collective."""
    if control.size == 1 or not boot.has_mpi():
        return None
    wanted = os.environ.get(KEY, "auto") in ("auto", "shared")
    able = wanted and boot.mpi_threads() and not tf.config.list_physical_devices("GPU")
    rows = control.gather((control.node, able))
    if any(row != (control.node, True) for row in rows):
        return None
    from hvdtrain.comm.collectives.shared import SharedCollectives, SharedUnavailable

    try:
        return SharedCollectives(boot.mpi_comm(), timeout_s=horovod.stall_bound(os.environ))
    except SharedUnavailable as error:
        if control.rank == 0:
            warnings.warn(f"gradients go over Horovod: {error.reason}", stacklevel=2)
        return None


class NearSum:
    """The sum or mean over ranks of one list of dense gradients. Collective to make and to run.

    ``shapes``, ``dtypes``: of the gradients. ``mean``: divide the sums by the number of ranks. ``back``: the same
    exchange over another wire, through which gradients of the results flow.
    """

    def __init__(self, wire: SharedCollectives, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str],
                 mean: bool, back: Callable[..., list[tf.Tensor]]) -> None:
        self._wire, self._name, self._op, self._back = wire, name, "mean" if mean else "sum", back
        self._shapes = list(shapes)
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        self._sizes = sizes
        self._parts: list[tuple[list[int], Memory]] = []
        self._small: list[list[int]] = []
        for dtype in dict.fromkeys(dtypes):
            own = [i for i, d in enumerate(dtypes) if d == dtype]
            small, large = ([i for i in own if (sizes[i] < SMALL) is below] for below in (True, False))
            vectors = [(sum(sizes[i] for i in small),)] if small else []
            bucket = Bucket(0, (), (*vectors, *((sizes[i],) for i in large)), (), 0, dtype)
            self._small.append(small)
            self._parts.append((large, Memory(wire, aligned(bucket))))

    def __call__(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients over the ranks, while a graph is traced."""
        @tf.custom_gradient
        def summed(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            return self._nodes(xs), lambda *dys: self._back(list(dys))

        found = summed(*grads)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def _nodes(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The node, and what packs small gradients for it and takes them apart again."""
        vectors: list[tf.Tensor] = []
        for small, (large, _) in zip(self._small, self._parts):
            if small:
                vectors.append(tf.concat([tf.reshape(grads[i], [-1]) for i in small], 0))
            vectors += [tf.reshape(grads[i], [-1]) for i in large]
        results = iter(tf.numpy_function(self._run, vectors, [x.dtype for x in vectors]))
        out: list[Any] = [None] * len(grads)
        for small, (large, _) in zip(self._small, self._parts):
            if small:
                packed = tf.ensure_shape(next(results), [sum(self._sizes[i] for i in small)])
                for i, x in zip(small, tf.split(packed, [self._sizes[i] for i in small])):
                    out[i] = tf.reshape(x, self._shapes[i])
            for i in large:
                out[i] = tf.reshape(tf.ensure_shape(next(results), [self._sizes[i]]), self._shapes[i])
        return out

    def _run(self, *vectors: np.ndarray) -> list[np.ndarray]:
        """What the node does: fill the shared memory, sum there, give it back."""
        try:
            found: list[np.ndarray] = []
            for n, (_, memory) in enumerate(self._parts):
                flat_N = memory.free()
                fill(flat_N, memory.bucket, vectors[len(found):len(found) + len(memory.bucket.shapes)])
                if flat_N.size:
                    self._wire.allreduce(flat_N, f"{self._name}.{n}", self._op).wait()
                found += memory.arrays()
            self._wire.looked()  # nobody asks for squares here
            return found
        except BaseException as error:
            _failures[:] = [error]
            raise


@contextmanager
def failures() -> Iterator[None]:
    """Let what a node raised out as itself, where TensorFlow reports an error of its own that quotes it."""
    _failures.clear()
    try:
        yield
    except tf.errors.OpError as error:
        if _failures:
            raise _failures.pop() from error
        raise
