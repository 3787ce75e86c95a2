"""What compressors share: no state, no warm-up, the bytes of an uncompressed sum, and the operations they need beside
those of every seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdtrain.core import protocols
from hvdtrain.core.protocols import AllGather, Array, Exchange, Spread
from hvdtrain.core.protocols.types import Bucket, Shards


DEPENDENT = 1e-5
"""A column of `Ops.orthogonalize` that keeps less than this part of its length beside those before it is noise."""


class Ops(protocols.Ops, Protocol):
    """The array operations of a backend, with those that only compressors use."""

    def abs_max_rows(self, x_BK: Array) -> Array:
        """Largest magnitude of each row: (B, K) -> (B,); NaN where a row has one."""
        ...

    def drop(self, flat_N: Array, index_k: Array) -> Array:
        """A copy with zeros at int64 indices: (N,), (k,) -> (N,)."""
        ...

    def by_part(self, index_k: Array, ends_P: Sequence[int]) -> tuple[Array, Array]:
        """Sort different int64 indices by the part in which they lie: (their order int64 (k,), how many int32 (P,)).

        Part p ends before index ``ends_P[p]``, where the next one begins.
        """
        ...

    def plus(self, x: Array, y: Array) -> Array:
        """``x + y``, once ``x`` is there: a sum of several stays in this order where a graph is optimised, too."""
        ...

    def minus_scaled(self, x: Array, y: Array, scale: float) -> Array:
        """``x - scale * y``, in one pass where the backend can."""
        ...


class Stateless:
    """A compressor without state, stages, or reductions beside the sum."""

    name = ""
    dtypes: frozenset[str] | None = frozenset({"float32"})
    reductions: frozenset[str] = frozenset()
    own_mean = False
    elementwise = False
    in_place = False
    numerics = "lossy"
    """What the compressor does to gradients, for tables."""
    bytes_share = 1.0
    """Estimated share of a gradient's bytes that a rank sends."""
    same_bits = False
    """Ranks with the same kind of device get the same bits, because each element is decoded by itself."""
    auto_order = 0
    """Place among the compressors that ``compression: auto`` tries, the gentlest first; 0: `auto` never takes it."""
    not_auto = ""
    """Reason why `auto` leaves out the compressor with these settings."""
    warmup_steps = 0
    """Steps at the start of a run that send more."""
    own_key = ""
    """Key that asks for the compressor in place of ``compression``."""
    approximates = True
    """The sum is not that of the gradients up to rounding, which a note of the run says."""
    same_threads = False
    """Ranks get the same bits with the same number of compute threads only."""
    own_momentum = ""
    """Key and value of the momentum that the compressor applies, on one rank too, in place of the optimizer's."""
    pairs_ranks = False
    """The number of ranks has to be a power of two."""

    def describe(self) -> str:
        """The name alone."""
        return self.name

    def stage(self, step: int) -> int:
        """No warm-up."""
        return 0

    def init(self, ops: protocols.Ops, bucket: Bucket) -> dict[str, Array]:
        """No state."""
        return {}

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """Sum a bucket over the ranks."""
        raise NotImplementedError

    def scatter(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, shards: Shards,
                stage: int = 0) -> Exchange:
        """Sum the whole bucket, and return a copy of this rank's shard: a view would keep the whole."""
        sum_N, new = yield from self.exchange(ops, flat_N, state, bucket, len(shards.sizes), stage)
        return ops.pack([sum_N[shards.own]]), new

    def spread(self, ops: Ops, sum_K: Array, bucket: Bucket, size: int) -> Spread:
        """Move the sums as they are."""
        gathered_PK = yield AllGather(sum_K)
        return ops.reshape(gathered_PK, (-1,))[:bucket.n]


class Uncompressed(Stateless):
    """Moves every element as it is."""

    dtypes: frozenset[str] | None = None

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        """Ring all-reduce: each rank sends 2 (P-1)/P of the vector, rounded up (Patarasuk and Yuan 2009)."""
        return ring_allreduce_bytes(bucket.nbytes, size)


def ring_allreduce_bytes(nbytes: int, size: int) -> int:
    """Bytes one rank sends in a ring all-reduce of ``nbytes``: 2 (P-1)/P, rounded up (Patarasuk and Yuan 2009)."""
    return -(-2 * (size - 1) * nbytes // size)
