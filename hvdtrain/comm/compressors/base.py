"""Base of compressors: their operations, defaults, top-k's sample, and the two shots of fp16, bf16 and int8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from hvdtrain.core import protocols
from hvdtrain.core.protocols import AllGather, AllToAll, AllToAllV, Array, Exchange, Spread
from hvdtrain.core.protocols.types import Bucket, Shards

DEPENDENT = 1e-5
"""A column of `orthogonalize` that keeps less than this share of its length beside those before it is noise."""


class CompressorOps(protocols.Ops, Protocol):
    """The array operations of a backend, with those that only compressors use."""

    def abs_max_rows(self, x_BK: Array) -> Array:
        """Return the largest magnitude of each row: (B, K) -> (B,); NaN where a row has one."""

    def drop(self, flat_N: Array, index_k: Array) -> Array:
        """Return a copy with zeros at int64 indices: (N,), (k,) -> (N,)."""

    def by_part(self, index_k: Array, ends_P: Sequence[int]) -> tuple[Array, Array]:
        """Sort different int64 indices by the part in which they lie: (their order int64 (k,), how many int32 (P,)).

        Part p ends before index ``ends_P[p]``, where the next one begins.
        """

    def plus(self, x: Array, y: Array) -> Array:
        """Return ``x + y``, once ``x`` is there: a sum of several stays in order in an optimised graph, too."""

    def minus_scaled(self, x: Array, y: Array, scale: float) -> Array:
        """Return ``x - scale * y``, in one pass where the backend can."""


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
        return self.name

    def stage(self, step: int) -> int:
        return 0

    def init(self, ops: protocols.Ops, bucket: Bucket) -> dict[str, Array]:
        return {}

    def exchange(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        raise NotImplementedError

    def scatter(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, shards: Shards,
                stage: int = 0) -> Exchange:
        """Sum the whole bucket, and return a copy of this rank's shard: a view would keep the whole."""
        sum_N, new = yield from self.exchange(ops, flat_N, state, bucket, len(shards.sizes), stage)
        return ops.pack([sum_N[shards.own]]), new

    def spread(self, ops: CompressorOps, sum_K: Array, bucket: Bucket, size: int) -> Spread:
        """Move the sums as they are."""
        gathered_PK = yield AllGather(sum_K)
        return ops.reshape(gathered_PK, (-1,))[:bucket.n]


class Uncompressed(Stateless):
    """Moves every element as it is."""

    dtypes: frozenset[str] | None = None

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        return ring_allreduce_bytes(bucket.nbytes, size)


def ring_allreduce_bytes(nbytes: int, size: int) -> int:
    """Return the bytes one rank sends in a ring all-reduce: 2 (P-1)/P, rounded up (Patarasuk and Yuan 2009)."""
    return -(-2 * (size - 1) * nbytes // size)


SAMPLE = 1 << 15
"""Entries in the sample."""
LEAST = 2.0 ** -126
"""Smallest magnitude that makes a candidate: zeros do not, however many there are."""


def sample(n: int, k: int) -> tuple[int, int]:
    """Return (stride, place) of top-k's sample: the threshold is the ``place``-th largest of every ``stride``-th
    magnitude.

    Only entries that reach the threshold are sorted, somewhat more than k; where fewer do (the sample was unlucky, or
    NaN), everything is, so the answer is exact in any case (Deep Gradient Compression, Lin et al., ICLR 2018, section
    3). (1, 0) where a sample is not worth it. A true top-k entry is in the sample with probability 1/stride, so their
    number there has mean q = k/stride and deviation below sqrt(q); ``place`` is a quarter and six deviations above the
    mean, because gradients are not in random order. The stride shares no small factor with a row of a weight.
    """
    if n < 4 * SAMPLE:
        return 1, 0
    stride = n // SAMPLE
    while math.gcd(stride, 2 * 3 * 5 * 7) != 1:
        stride += 1
    mean = k / stride
    place = math.ceil(1.25 * mean + 6 * math.sqrt(mean) + 8)
    return (stride, place) if place * stride <= 0.75 * n else (1, 0)


class Halves(Stateless):
    """16 bits for each element in two shots, without state; rounds an element by 2^-11 (fp16) or 2^-8 (bf16) of it.

    A ring all-reduce would round after each of its P-1 additions. So each rank sums one P-th of the vector: (1)
    all-to-all of the encoded parts, (2) decode, sum in float32 in rank order, encode the sum, all-gather, decode.
    """

    elementwise = same_bits = True
    numerics, bytes_share = "lossy: 16 bits", 0.5

    def exchange(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """All-to-all of int16 (P, K), all-gather of int16 (K,), K = ceil(N / P)."""
        k = part_length(bucket.n, size)
        received_PK = yield AllToAll(self.encode(ops, as_rows(ops, flat_N, bucket.n, size, k)))
        return (yield from self.spread(ops, self._sum(ops, received_PK, size, k), bucket, size)), state

    def scatter(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, shards: Shards,
                stage: int = 0) -> Exchange:
        """All-to-all of int16 in parts as long as the shards; the sum is rounded as for `spread`."""
        size, k = len(shards.sizes), shards.sizes[shards.rank]
        received_N = yield AllToAllV(self.encode(ops, flat_N), shards.sizes, (k,) * size)
        return self.decode(ops, self._sum(ops, received_N, size, k)), state

    def _sum(self, ops: CompressorOps, bits: Array, size: int, k: int) -> Array:
        """Sum encoded rows, in any shape of P K elements, in rank order: the sum encoded (K,)."""
        return self.encode(ops, sum_of_rows(ops, ops.reshape(self.decode(ops, bits), (size, k)), size))

    def spread(self, ops: CompressorOps, sum_K: Array, bucket: Bucket, size: int) -> Spread:
        """All-gather of int16 (K,)."""
        gathered_PK = yield AllGather(sum_K)
        return self.decode(ops, gathered_PK)[:bucket.n]

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        """Two shots of (P-1) parts each, 2 bytes an element: half of an uncompressed sum."""
        return 2 * (size - 1) * 2 * part_length(bucket.n, size)

    def encode(self, ops: CompressorOps, x: Array) -> Array:
        """float32 -> int16 of the same shape."""
        raise NotImplementedError

    def decode(self, ops: CompressorOps, bits: Array) -> Array:
        """int16 of any shape -> float32 (n,)."""
        raise NotImplementedError


def part_length(n: int, size: int) -> int:
    """Return K = ceil(N / P), the elements that one rank sums."""
    return -(-n // size)


def as_rows(ops: CompressorOps, flat_N: Array, n: int, size: int, k: int) -> Array:
    """Pad with zeros and cut: (N,) -> (P, K) with P K >= N."""
    missing = size * k - n
    padded = ops.pack([flat_N, ops.zeros(missing, "float32")]) if missing else flat_N
    return ops.reshape(padded, (size, k))


def sum_of_rows(ops: CompressorOps, x_PK: Array, size: int) -> Array:
    """Sum in rank order: (P, K) -> (K,)."""
    total_K = x_PK[0]
    for p in range(1, size):
        total_K = ops.plus(total_K, x_PK[p])
    return total_K
