"""What `fp16`, `bf16` and `int8` share: each element in fewer bits, moved in two shots, summed in float32.

A ring all-reduce would round after each of its P-1 additions, and neither bfloat16 nor scaled bytes can be summed by
MPI. So here each rank sums one P-th of the vector: (1) all-to-all of the encoded parts, (2) decode, sum in float32 in
rank order, encode the sum, all-gather, decode. Every rank decodes the same bits, so the result has the same bits
everywhere.
"""

from __future__ import annotations

from hvdtrain.comm.compressors.base import Ops, Stateless
from hvdtrain.core.protocols import AllGather, AllToAll, Array, Exchange
from hvdtrain.core.protocols.types import Bucket


class Halves(Stateless):
    """16 bits for each element, without state; a rounding changes an element by 2^-11 (fp16) or 2^-8 (bf16) of it."""

    elementwise = same_bits = True
    numerics, bytes_share = "lossy: 16 bits", 0.5

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """All-to-all of int16 (P, K), all-gather of int16 (K,), K = ceil(N / P)."""
        k = part_length(bucket.n, size)
        received_PK = yield AllToAll(self.encode(ops, as_rows(ops, flat_N, bucket.n, size, k)))
        sum_K = sum_of_rows(ops.reshape(self.decode(ops, received_PK), (size, k)), size)
        gathered_PK = yield AllGather(self.encode(ops, sum_K))
        return self.decode(ops, gathered_PK)[:bucket.n], state

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


def sum_of_rows(x_PK: Array, size: int) -> Array:
    """Sum in rank order: (P, K) -> (K,)."""
    total_K = x_PK[0]
    for p in range(1, size):
        total_K = total_K + x_PK[p]
    return total_K
