"""Gradients and tensors of users' graphs over transports in host memory: shared memory of one host, and plain MPI.

Owns when shared memory is used, and numpy buffers on their way in and out. The collectives are
`hvdtrain.comm.collectives`', the nodes `hvdtrain.backends.tensorflow.nodes`'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.nodes import HostNodes, host_node
from hvdtrain.backends.tensorflow.ops import Memory, aligned, fill
from hvdtrain.comm.collectives.base import ReadyHandle, gather_rows
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.comm.collectives.shared import SharedCollectives
from hvdtrain.core.protocols import Handle
from hvdtrain.core.protocols.types import Bucket

DTYPES = frozenset({"float32", "float64"})
SMALL = 1 << 14
"""Elements below which gradients travel as one vector: a tensor of its own costs more than another copy of it."""
FOLD: dict[str, Any] = {"min": np.minimum, "max": np.maximum, "product": np.multiply}


class SharedSum:
    """The sum or mean over ranks of one list of dense gradients, as one node. Collective to make and to run.

    It copies each gradient once, into memory that all ranks see, sums there and returns tensors over the same memory.
    It blocks its thread until every rank is there, which cannot deadlock: Horovod's operations give their thread back
    while they wait, and those of this kind run one after another.
    ``shapes``, ``dtypes``: of the gradients. ``mean``: divide the sums by the number of ranks. ``back``: the same
    exchange over another transport, through which gradients of the results flow.
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
        """Return the gradients over the ranks, while a graph is traced."""
        @tf.custom_gradient
        def summed(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            return self._nodes(xs), lambda *dys: self._back(list(dys))

        sums = summed(*grads)
        return list(sums) if isinstance(sums, (list, tuple)) else [sums]

    def _nodes(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        vectors: list[tf.Tensor] = []
        for small, (large, _) in zip(self._small, self._parts):
            if small:
                vectors.append(tf.concat([tf.reshape(grads[i], [-1]) for i in small], 0))
            vectors += [tf.reshape(grads[i], [-1]) for i in large]
        results = iter(host_node(self._run, vectors, [x.dtype for x in vectors], f"gradients {self._name}",
                                 stateful=True))
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
        sums: list[np.ndarray] = []
        for n, (_, memory) in enumerate(self._parts):
            flat_N = memory.free()
            fill(flat_N, memory.bucket, vectors[len(sums):len(sums) + len(memory.bucket.shapes)])
            if flat_N.size:
                self._wire.allreduce(flat_N, f"{self._name}.{n}", self._op).wait()
            sums += memory.arrays()
        self._wire.looked()  # nobody asks for squares here
        return sums


class PlainMpi(HostNodes):
    """`HostNodes` of plain MPI for users' graphs, with the collectives of `HorovodCollectives` that divide rows.

    Its nodes have a state, for users' graphs branch and loop. Not differentiable. Sums within hosts are no faster.
    """

    overlaps = False
    hierarchical = False
    compares_roots = halves = has_each = False

    def __init__(self, wire: MpiCollectives, world_rank_of: list[int]) -> None:
        super().__init__(wire)
        self.name, self.reductions, self._ranks = "plain MPI", frozenset(FOLD), world_rank_of

    def allreduce(self, flat_N: tf.Tensor, name: str, op: str = "sum") -> ReadyHandle:
        """Sum a tensor of any shape, as `Collectives.allreduce` does a vector."""
        def run(x: np.ndarray) -> np.ndarray:
            if op != "sum":
                return np.asarray(FOLD[op].reduce(gather_rows(self._wire, x[None], name), axis=0), x.dtype)
            return self._wire.allreduce(np.array(x).reshape(-1), name).wait().reshape(x.shape)

        return self._own(run, flat_N, name, flat_N.shape)

    def gather_rows(self, x: tf.Tensor, name: str) -> ReadyHandle:
        """Return every rank's rows, by rank; ranks may have different numbers of rows."""
        return self._own(lambda x: gather_rows(self._wire, x, name), x, name, [None, *x.shape[1:]])

    def alltoall_rows(self, x: tf.Tensor, splits_P: tf.Tensor, name: str) -> ReadyHandle:
        """Send ``splits_P[p]`` rows to rank p; every rank sees all rows on the way."""
        def run(x: np.ndarray, splits_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            splits_PP = gather_rows(self._wire, splits_P.astype(np.int64)[None], f"{name}.splits")
            parts = np.split(gather_rows(self._wire, x, name), np.cumsum(splits_PP.reshape(-1))[:-1])
            return (np.concatenate(parts[self.rank::self.size]), splits_PP[:, self.rank].astype(np.int32))

        out, received_P = host_node(run, [x, splits_P], [x.dtype, tf.int32], f"collective {name}", stateful=True)
        return ReadyHandle((tf.ensure_shape(out, [None, *x.shape[1:]]), tf.ensure_shape(received_P, [self.size])))

    def reducescatter(self, flat_N: tf.Tensor, name: str) -> ReadyHandle:
        return self.scatter_rows(flat_N, name)

    def scatter_rows(self, x: tf.Tensor, name: str) -> ReadyHandle:
        """Return this rank's rows of the sum over ranks; the first R mod P ranks get one more."""
        def run(x: np.ndarray) -> np.ndarray:
            total = self._wire.allreduce(np.array(x).reshape(-1), name).wait().reshape(x.shape)
            return np.ascontiguousarray(np.array_split(total, self.size)[self.rank])

        return self._own(run, x, name, [None, *x.shape[1:]])

    def broadcast(self, x_N: tf.Tensor, name: str, root: int = 0) -> ReadyHandle:
        """Return the tensor of rank ``root`` of the job; any shape."""
        where = self._ranks.index(root)

        def run(x: np.ndarray) -> np.ndarray:
            return self._wire.broadcast(np.array(x).reshape(-1), name, where).wait().reshape(x.shape)

        return self._own(run, x_N, name, x_N.shape)

    def _node(self, call: Callable[[np.ndarray], Handle], x: tf.Tensor, name: str, shape: Any,
              prepare: Callable[[np.ndarray], np.ndarray] = lambda x: x, new: bool = False) -> ReadyHandle:
        # A copy: results of MPI may lie in memory that its next call overwrites.
        return self._own(lambda x: np.array(call(prepare(x)).wait(), x.dtype), x, name, shape)

    def _own(self, run: Callable[[np.ndarray], np.ndarray], x: tf.Tensor, name: str, shape: Any) -> ReadyHandle:
        """Add a node whose result is in memory of its own."""
        result = host_node(run, [x], x.dtype, f"collective {name}", stateful=True)
        return ReadyHandle(tf.ensure_shape(result, shape))
