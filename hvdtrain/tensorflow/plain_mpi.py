"""The wire of TensorFlow users where Horovod is not built: plain MPI, called from inside graphs.

Owns how numpy buffers get in and out of a graph. The collectives are `hvdtrain.comm.collectives.mpi`'s.

MPI pairs collectives by their order alone. `tf.numpy_function` is stateful, so TensorFlow runs those of one function in
the order in which its Python code made them, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.comm.collectives.base import WithoutMemory
from hvdtrain.comm.collectives.mpi import MpiCollectives

FOLD: dict[str, Any] = {"min": np.minimum, "max": np.maximum, "product": np.multiply}


class _Result:
    """A collective's result."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


class PlainMpi(WithoutMemory):
    """`hvdtrain.core.protocols.Collectives` for graphs, with the three of `HorovodCollectives` that cut rows over
    ranks.

    Not differentiable. Sums within hosts are not faster than across them.
    """

    name = "plain MPI"
    in_graph = True
    host = False
    hierarchical = False
    compares_roots = False
    reductions = frozenset(FOLD)

    def __init__(self, inner: MpiCollectives, world_rank_of: list[int]) -> None:
        self.rank, self.size, self.dtypes = inner.rank, inner.size, inner.dtypes
        self._inner, self._ranks = inner, world_rank_of

    def allreduce(self, flat_N: tf.Tensor, name: str, op: str = "sum") -> _Result:
        """Combine over ranks; any shape."""
        def run(x: np.ndarray) -> np.ndarray:
            if op != "sum":
                return np.asarray(FOLD[op].reduce(self._rows(x[None], name), axis=0)).astype(x.dtype)
            return self._inner.allreduce(np.array(x).reshape(-1), name).wait().reshape(x.shape)

        return self._call(run, [flat_N], flat_N.shape)

    def allgather(self, x_K: tf.Tensor, name: str) -> _Result:
        """(K,) -> (P, K)."""
        return self._call(lambda x: self._inner.allgather(x, name).wait(), [x_K], [self.size, *x_K.shape])

    def gather_rows(self, x: tf.Tensor, name: str) -> _Result:
        """Every rank's rows, by rank; ranks may have different numbers of rows."""
        return self._call(lambda x: self._rows(x, name), [x], [None, *x.shape[1:]])

    def alltoall(self, x_PK: tf.Tensor, name: str) -> _Result:
        """Row p goes to rank p."""
        return self._call(lambda x: self._inner.alltoall(x, name).wait(), [x_PK], x_PK.shape)

    def alltoall_rows(self, x: tf.Tensor, splits_P: tf.Tensor, name: str) -> _Result:
        """``splits_P[p]`` rows go to rank p; every rank sees all rows on the way."""
        def run(x: np.ndarray, splits_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            splits_PP = self._rows(splits_P.astype(np.int64)[None], f"{name}.splits")
            parts = np.split(self._rows(x, name), np.cumsum(splits_PP.reshape(-1))[:-1])
            return (np.concatenate(parts[self.rank::self.size]), splits_PP[:, self.rank].astype(np.int32))

        out, received_P = tf.numpy_function(run, [x, splits_P], [x.dtype, tf.int32])
        return _Result((tf.ensure_shape(out, [None, *x.shape[1:]]), tf.ensure_shape(received_P, [self.size])))

    def reducescatter(self, flat_N: tf.Tensor, name: str) -> _Result:
        """(N,) -> (N/P,)."""
        return self.scatter_rows(flat_N, name)

    def scatter_rows(self, x: tf.Tensor, name: str) -> _Result:
        """This rank's rows of the sum over ranks; the first R mod P ranks get one more."""
        def run(x: np.ndarray) -> np.ndarray:
            total = self._inner.allreduce(np.array(x).reshape(-1), name).wait().reshape(x.shape)
            return np.ascontiguousarray(np.array_split(total, self.size)[self.rank])

        return self._call(run, [x], [None, *x.shape[1:]])

    def broadcast(self, x_N: tf.Tensor, name: str, root: int = 0) -> _Result:
        """The vector of rank ``root`` of the job; any shape."""
        where = self._ranks.index(root)
        return self._call(lambda x: self._inner.broadcast(np.array(x).reshape(-1), name, where).wait().reshape(x.shape),
                          [x_N], x_N.shape)

    def _rows(self, x: np.ndarray, name: str) -> np.ndarray:
        """Rows of all ranks; shorter parts travel padded."""
        n_P = self._inner.allgather(np.array([len(x)], np.int64), f"{name}.rows").wait().reshape(-1)
        padded = np.zeros((int(n_P.max()), *x.shape[1:]), x.dtype)
        padded[:len(x)] = x
        all_PK = self._inner.allgather(padded.reshape(-1), name).wait().reshape(self.size, *padded.shape)
        return np.concatenate([rows[:n] for rows, n in zip(all_PK, n_P)])

    def _call(self, run: Callable[[np.ndarray], np.ndarray], xs: list[tf.Tensor], shape: Any) -> _Result:
        return _Result(tf.ensure_shape(tf.numpy_function(run, xs, xs[0].dtype), shape))
