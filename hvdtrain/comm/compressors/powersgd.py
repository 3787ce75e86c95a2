"""`powersgd`: each gradient matrix as the product of two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

Owns which tensors are matrices, of what shape, and the exchange of their factors. How columns are made orthonormal is
the backends' (`CompressorOps.orthogonalize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvdtrain import config
from hvdtrain.comm.compressors.base import CompressorOps, Stateless, ring_allreduce_bytes
from hvdtrain.core import protocols
from hvdtrain.core.protocols import AllReduce, Array, Exchange
from hvdtrain.core.protocols.types import Bucket

MIN_RATE = 2
"""A matrix is compressed if that makes it more than this many times smaller, as in PyTorch's PowerSGD hook."""
SEED = 20190905
FRESH = 1e-6
"""Share of the random start in each warm start: a direction that was lost (a gradient of zeros) can come back."""


@dataclass(frozen=True)
class MatrixShape:
    """Tensor ``index`` of a bucket as an (n, m) matrix, sent as r columns of n and r of m."""

    index: int
    n: int
    m: int
    r: int


def split(shape: Sequence[int]) -> tuple[int, int]:
    """Return the (n, m) with the least n + m that joins leading dimensions to n and trailing ones to m.

    So a convolution gives the same kind of matrix as (out, in, kh, kw) in PyTorch and (kh, kw, in, out) in Keras.
    """
    sizes = [(int(np.prod(shape[:i], dtype=np.int64)), int(np.prod(shape[i:], dtype=np.int64)))
             for i in range(1, len(shape))]
    return min(sizes, key=sum)


def matrices(shapes: Sequence[Sequence[int]], rank: int) -> list[MatrixShape]:
    """Return the tensors worth compressing: two dimensions or more, n m > 2 r (n + m) with r = min(rank, n, m)."""
    found = []
    for index, shape in enumerate(shapes):
        if len(shape) < 2:
            continue
        n, m = split(shape)
        r = min(rank, n, m)
        if n * m > MIN_RATE * r * (n + m):
            found.append(MatrixShape(index, n, m, r))
    return found


@lru_cache(maxsize=1024)
def start(bucket: int, index: int, r: int, m: int) -> np.ndarray:
    """Return the first Q of a tensor, standard normal (r, m): the same on every rank and in every framework."""
    q_RM = np.random.default_rng([SEED, bucket, index]).standard_normal((r, m)).astype(np.float32)
    q_RM.flags.writeable = False
    return q_RM


class PowerSGD(Stateless):
    """Power iteration, one a step, warm-started, with error feedback.

    For a matrix with gradients g_r on P ranks, residuals e_r and Q of the step before (stored as rows, (r, m))::

        a_r = g_r + e_r     p = orthonormal(sum_r a_r Q)     Q = sum_r a_r^T p     S = p Q^T     e_r = a_r - S / P

    S stands for the SUM of the gradients (law 1), and only the sum of the residuals, sum_r a_r - S, comes back in
    later steps: how samples are cut over ranks does not change the trajectory. The first all-reduce carries all P
    factors of the bucket and every tensor that stays uncompressed (biases, small ones), the second all Q factors.

    S is computed on each rank from equal bits, by a matrix product; ranks whose processors round that differently
    (unlike CPU generations, unlike numbers of threads) would drift apart by rounding errors.
    """

    name, numerics = "powersgd", "lossy: low rank"
    bytes_share, same_threads = 0.05, True
    auto_order = 6

    def __init__(self, rank: int = 4) -> None:
        assert rank >= 1, rank
        self.rank = rank

    def describe(self) -> str:
        return f"powersgd rank {self.rank}"

    def init(self, ops: protocols.Ops, bucket: Bucket) -> dict[str, Array]:
        state = {}
        for x in matrices(bucket.shapes, self.rank):
            state[f"q.{x.index}"] = ops.from_host(np.array(start(bucket.number, x.index, x.r, x.m)))
            state[f"residual.{x.index}"] = ops.reshape(ops.zeros(x.n * x.m, "float32"), (x.n, x.m))
        return state

    def exchange(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """All-reduce of the P factors and the uncompressed tensors; all-reduce of the Q factors."""
        chosen = matrices(bucket.shapes, self.rank)
        if not chosen:
            return (yield AllReduce(flat_N)), state
        parts = ops.unpack(flat_N, bucket.shapes)
        plain = sorted(set(range(len(parts))) - {x.index for x in chosen})
        a = [ops.reshape(parts[x.index], (x.n, x.m)) + state[f"residual.{x.index}"] for x in chosen]
        p = [ops.matmul(a_nm, ops.transpose(state[f"q.{x.index}"])) for x, a_nm in zip(chosen, a)]

        first = yield AllReduce(ops.pack([*p, *(parts[i] for i in plain)]))
        shapes = [*((x.n, x.r) for x in chosen), *(bucket.shapes[i] for i in plain)]
        received = ops.unpack(first, shapes)
        p = [ops.orthogonalize(p_nr) for p_nr in received[:len(chosen)]]

        # p^T a, not a^T p: it runs along the rows of a.
        second = yield AllReduce(ops.pack([ops.matmul(ops.transpose(p_nr), a_nm) for p_nr, a_nm in zip(p, a)]))
        q = ops.unpack(second, [(x.r, x.m) for x in chosen])

        sums, new = dict(zip(plain, received[len(chosen):])), {}
        for x, a_nm, p_nr, q_rm in zip(chosen, a, p, q):
            sums[x.index] = ops.matmul(p_nr, q_rm)
            new[f"residual.{x.index}"] = ops.minus_scaled(a_nm, sums[x.index], 1 / size)
            new[f"q.{x.index}"] = self._warm(ops, q_rm, bucket.number, x)
        return ops.pack([sums[i] for i in range(len(parts))]), new

    def _warm(self, ops: CompressorOps, q_RM: Array, bucket: int, x: MatrixShape) -> Array:
        """Return the next step's Q: of magnitude 1, with a trace of the random start."""
        scale = 1 / (ops.abs_max(q_RM) + 1e-30)
        return q_RM * scale + ops.from_host(start(bucket, x.index, x.r, x.m)) * FRESH

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        chosen = matrices(bucket.shapes, self.rank)
        first = sum(x.r * x.n for x in chosen) + bucket.n - sum(x.n * x.m for x in chosen)
        second = sum(x.r * x.m for x in chosen)
        return ring_allreduce_bytes(4 * first, size) + ring_allreduce_bytes(4 * second, size)


def make(exchange: config.ExchangeConfig) -> PowerSGD:
    return PowerSGD(exchange.powersgd_rank)
