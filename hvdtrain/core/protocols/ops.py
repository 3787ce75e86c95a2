"""The array operations' seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hvdtrain.core.protocols.types import Array, Bucket, Shards
from hvdtrain.core.protocols.wire import Collectives, Exchange, Spread


class Cell(Protocol):
    """Memory for one array that survives a step; read and written at once or as nodes of a graph that is traced."""

    def read(self) -> Array:
        """Return the array, which later writes leave as it is."""
        ...

    def write(self, x: Array) -> None:
        """Replace the array by one of the same shape and dtype."""
        ...


class Ops(Protocol):
    """The functional array operations that the core and the compressors need, one implementation per backend.

    ``+ - * / abs`` of the arrays themselves are used as they are. Dtypes are given by numpy's names.
    ``writes``: arrays can be written to (`overwrite`).
    """

    name: str
    writes: bool

    def zeros(self, n: int, dtype: str) -> Array:
        """(n,) zeros."""
        ...

    def buffer(self, n: int, dtype: str, own: np.ndarray | None = None) -> Array:
        """(n,) zeros for a stage to write gradients into, in memory ``own`` of a wire's if there is such.

        What `to_host` makes of it is that memory, not a copy.
        """
        ...

    def cast(self, x: Array, dtype: str) -> Array:
        """The same shape in another dtype."""
        ...

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """The same elements, row-major, in another shape."""
        ...

    def pack(self, xs: Sequence[Array]) -> Array:
        """Flatten and join: arrays of any shape -> (N,)."""
        ...

    def unpack(self, flat_N: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        """Undo `pack`."""
        ...

    def bits16(self, x: Array) -> Array:
        """The bits of float32 ``x`` rounded to bfloat16 (to nearest, ties to even), as int16."""
        ...

    def from_bits16(self, bits: Array) -> Array:
        """Undo `bits16`: int16 -> float32."""
        ...

    def bitcast(self, x: Array, dtype: str) -> Array:
        """The bits of a vector read as another dtype: (n,) -> (n * itemsize / itemsize of ``dtype``,).

        ``x`` fills whole elements of ``dtype``, and where it is a slice it begins at a multiple of that type's bytes:
        pad what precedes it. numpy and PyTorch raise where it does not; TensorFlow may copy such a slice.
        """
        ...

    def topk(self, flat_N: Array, k: int) -> tuple[Array, Array]:
        """The k entries of largest magnitude: (values (k,), indices int64 (k,)); ties to the lower index."""
        ...

    def take(self, flat_N: Array, index_k: Array) -> Array:
        """Elements at int64 indices: (N,), (k,) -> (k,)."""
        ...

    def scatter_add(self, n: int, index_k: Array, values_k: Array) -> Array:
        """A zero vector of n elements with ``values_k`` added at ``index_k``; an index may repeat."""
        ...

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix product: (n, m), (m, k) -> (n, k)."""
        ...

    def transpose(self, a: Array) -> Array:
        """(n, m) -> (m, n)."""
        ...

    def orthogonalize(self, m_NR: Array) -> Array:
        """Columns made orthonormal by Gram-Schmidt, as in PowerSGD (Vogels et al., NeurIPS 2019)."""
        ...

    def sum_squares(self, x: Array) -> Array:
        """Scalar sum of the squares of all elements, in float32 at least."""
        ...

    def abs_max(self, x: Array) -> Array:
        """Scalar largest magnitude; 0 of nothing."""
        ...

    def round(self, x: Array) -> Array:
        """To the nearest integer, ties to even; keeps the dtype."""
        ...

    def overwrite(self, x: Array, by: Array) -> Array:
        """Return ``by``, written to the memory of ``x`` where arrays can be written to (``writes``), which then is it.
        """
        ...

    def all_finite(self, x: Array) -> Array:
        """Scalar boolean array: no NaN and no infinity in ``x``."""
        ...

    def select(self, which: Array, x: Array, y: Array) -> Array:
        """``x`` where the scalar boolean array ``which`` is true, else ``y``."""
        ...

    def cell(self, value: Array) -> Cell:
        """Make a cell that holds ``value``, on this backend's device; outside of any graph that is being traced."""
        ...

    def during_backward(self, wire: Collectives) -> Collectives:
        """Return collectives over ``wire`` that a sink may call while backward runs.

        ``wire`` itself, or, where backward is a graph and ``wire`` is not, one that is called as nodes of it.
        """
        ...

    def free_bytes(self) -> int | None:
        """Return the bytes that this rank's device has left, 0 where it cannot be told; None: it is host memory."""
        ...

    def to_host(self, x: Array) -> np.ndarray:
        """As numpy; may share memory with ``x``."""
        ...

    def from_host(self, x: np.ndarray) -> Array:
        """As this backend's array, on its device; may share memory with ``x``."""
        ...


class Compressor(Protocol):
    """How one flat bucket of gradients is summed over the ranks; written once for all frameworks.

    ``dtypes``: of the buckets it takes; None: whatever the collectives sum. ``reductions``: beside "sum", what it
    asks of the collectives. ``own_mean``: it wants the mean over the rank's own samples, not its part of the global
    mean. ``elementwise``: it has no state and takes each element by itself, so that a bucket may be taken apart.
    ``in_place``: it sends a bucket as it lies, so that a transport may sum it in memory of the transport's own. The
    others: `hvdtrain.comm.compressors.base.Stateless`. State arrays are never written to: an exchange returns new
    ones, so that a step that is left out can be undone. A compressor must not hide what is not finite: NaN in, NaN
    out.
    """

    name: str
    dtypes: frozenset[str] | None
    reductions: frozenset[str]
    own_mean: bool
    elementwise: bool
    numerics: str
    bytes_share: float
    same_bits: bool
    auto_order: int
    not_auto: str
    warmup_steps: int
    own_key: str
    in_place: bool
    approximates: bool
    same_threads: bool
    own_momentum: str
    pairs_ranks: bool

    def describe(self) -> str:
        """Name and settings in short, for the summary; equal texts mean equal compression."""
        ...

    def stage(self, step: int) -> int:
        """Which stage of a warm-up step ``step`` (from 0) of the run belongs to; 0 where there is none.

        The numbers are few: a framework with graphs makes one for each.
        """
        ...

    def init(self, ops: Ops, bucket: Bucket) -> dict[str, Array]:
        """State of one bucket before its first exchange."""
        ...

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """Yield requests, receive their results, return ``(sum_N, new state)``; same bits on every rank."""
        ...

    def scatter(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, shards: Shards,
                stage: int = 0) -> Exchange:
        """As `exchange`, but return ``(this rank's shard of sum_N, new state)``: the same bits, for fewer bytes sent.

        A shard that is not finite need not be so on other ranks: whoever updates asks all of them.
        """
        ...

    def spread(self, ops: Ops, sum_K: Array, bucket: Bucket, size: int) -> Spread:
        """Gather the sums of 1/P of the bucket that each rank made and encoded: the second shot of an `exchange`.

        ``sum_K``: this rank's, K elements of the encoding for at least N / P of the sum. Returns the sum (N,).
        """
        ...

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        """Bytes one rank sends for a bucket; ``stage`` None is the one after any warm-up."""
        ...
