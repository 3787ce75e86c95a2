"""What `fp16`, `bf16` and `int8` share: each element in fewer bits, moved in two shots, summed in float32.

A ring all-reduce would round after each of its P-1 additions, and neither bfloat16 nor scaled bytes can be summed by
MPI. So here each rank sums one P-th of the vector: (1) all-to-all of the encoded parts, (2) decode, sum in float32 in
rank order, encode the sum, all-gather, decode. Every rank decodes the same bits, so the result has the same bits
everywhere.
"""

from __future__ import annotations

from hvdtrain.comm.compressors.base import Ops, Stateless
from hvdtrain.core.protocols import AllGather, AllToAll, AllToAllV, Array, Exchange, Spread
from hvdtrain.core.protocols.types import Bucket, Shards


class Halves(Stateless):
    """16 bits for each element, without state; a rounding changes an element by 2^-11 (fp16) or 2^-8 (bf16) of it."""

    elementwise = same_bits = True
    numerics, bytes_share = "lossy: 16 bits", 0.5

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """All-to-all of int16 (P, K), all-gather of int16 (K,), K = ceil(N / P)."""
        k = part_length(bucket.n, size)
        received_PK = yield AllToAll(self.encode(ops, as_rows(ops, flat_N, bucket.n, size, k)))
        return (yield from self.spread(ops, self._sum(ops, received_PK, size, k), bucket, size)), state

    def scatter(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, shards: Shards,
                stage: int = 0) -> Exchange:
        """All-to-all of int16 in parts as long as the shards; the sum is rounded as for `spread`."""
        size, k = len(shards.sizes), shards.sizes[shards.rank]
        received_N = yield AllToAllV(self.encode(ops, flat_N), shards.sizes, (k,) * size)
        return self.decode(ops, self._sum(ops, received_N, size, k)), state

    def _sum(self, ops: Ops, bits: Array, size: int, k: int) -> Array:
        """Sum encoded rows, in any shape of P K elements, in rank order: the sum encoded (K,)."""
        return self.encode(ops, sum_of_rows(ops, ops.reshape(self.decode(ops, bits), (size, k)), size))

    def spread(self, ops: Ops, sum_K: Array, bucket: Bucket, size: int) -> Spread:
        """All-gather of int16 (K,)."""
        gathered_PK = yield AllGather(sum_K)
        return self.decode(ops, gathered_PK)[:bucket.n]

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        """Two shots of (P-1) parts each, 2 bytes an element: half of an uncompressed sum."""
        return 2 * (size - 1) * 2 * part_length(bucket.n, size)

    def encode(self, ops: Ops, x: Array) -> Array:
        """float32 -> int16 of the same shape."""
        raise NotImplementedError

    def decode(self, ops: Ops, bits: Array) -> Array:
        """int16 of any shape -> float32 (n,)."""
        raise NotImplementedError


def part_length(n: int, size: int) -> int:
    """K = ceil(N / P): elements that one rank sums."""
    return -(-n // size)


def as_rows(ops: Ops, flat_N: Array, n: int, size: int, k: int) -> Array:
    """Zeros behind, then cut: (N,) -> (P, K) with P K >= N."""
    missing = size * k - n
    padded = ops.pack([flat_N, ops.zeros(missing, "float32")]) if missing else flat_N
    return ops.reshape(padded, (size, k))


def sum_of_rows(ops: Ops, x_PK: Array, size: int) -> Array:
    """Sum in rank order: (P, K) -> (K,)."""
    total_K = x_PK[0]
    for p in range(1, size):
        total_K = ops.plus(total_K, x_PK[p])
    return total_K
