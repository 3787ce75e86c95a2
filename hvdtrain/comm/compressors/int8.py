"""`int8`: a byte for each element and a scale for each block, in two shots with feedback on both.

That is the scheme of DoubleSqueeze (Tang et al., ICML 2019) and 1-bit Adam (Tang et al., ICML 2021).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from hvdtrain import config
from hvdtrain.comm.compressors.base import CompressorOps, Stateless, as_rows, part_length, sum_of_rows
from hvdtrain.core import protocols
from hvdtrain.core.protocols import AllGather, AllToAll, AllToAllV, Array, Exchange, Request, Spread
from hvdtrain.core.protocols.types import Bucket, Shards

BLOCK = 1024
"""Most elements that share one scale of int8."""
LANE = 4
"""int8 rows are whole float32s, so that the scales and the owner among the bytes lie where they can be read."""
STILL = 1e-30
"""Added to the scale of an int8 block, so that zeros stay zeros; blocks below about that wait in the residual."""


class Int8(Stateless):
    """8 bits for each element, one float32 scale for each block of at most 1024, with error feedback.

    State: the residual (N,), what this rank still owes: what was lost when its own gradient was encoded, and, in
    the part that it sums for all, what was lost when the sum was. Over all ranks, exactly up to float32::

        sum transmitted = sum_r g_r + sum_r e_r (before) - sum_r e_r (after)

    (1-bit Adam keeps the second in a vector of its own, which here would depend on P.) Element x of a block with
    scale s = absmax / 127 is round(x / s): an error of at most absmax / 254. NaN or infinity makes the block NaN.
    """

    name, numerics = "int8", "lossy: 8 bits"
    bytes_share, same_bits = 0.26, True
    auto_order = 4

    def init(self, ops: protocols.Ops, bucket: Bucket) -> dict[str, Array]:
        return {"residual": ops.zeros(bucket.n, "float32")}

    def exchange(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """All-to-all of int8 (P, scales + K + 4), all-gather of int8 (scales + K,)."""
        wire, residual_N = yield from self._sum(ops, flat_N, state, bucket, size)
        sum_L = ops.pack([w[0] for w in wire])
        return (yield from self.spread(ops, sum_L, bucket, size)), {"residual": residual_N}

    def scatter(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, shards: Shards,
                stage: int = 0) -> Exchange:
        """All-to-all of int8 (P, scales + K + 4); then each encoded sum goes to the shards that it lies in.

        Blocks stay where `exchange` has them, and with them all bits of sums and residuals, however unequal the shards
        are. Of about equal ones next to nothing travels in the second shot.
        """
        size, rank = len(shards.sizes), shards.rank
        (scale_14B, q_1K), residual_N = yield from self._sum(ops, flat_N, state, bucket, size)
        sent = [ShardPiece.of(bucket.n, shards, rank, q) for q in range(size)]
        got = [ShardPiece.of(bucket.n, shards, p, rank) for p in range(size)]
        parts = [x for piece in sent for x in (scale_14B[0][4 * piece.first:4 * piece.last],
                                               q_1K[0][piece.begin:piece.end], ops.zeros(piece.gap, "int8"))]
        received_L = yield AllToAllV(ops.pack(parts), [x.nbytes for x in sent], [x.nbytes for x in got])
        at, found = 0, []
        for piece in (x for x in got if x.nbytes):
            found.append(self._piece(ops, received_L[at:at + piece.nbytes], piece))
            at += piece.nbytes
        # Of an empty shard too the result is made of the answer: TensorFlow leaves a request out that nobody reads.
        return ops.pack(found or [ops.cast(received_L, "float32")]), {"residual": residual_N}

    def spread(self, ops: CompressorOps, sum_K: Array, bucket: Bucket, size: int) -> Spread:
        """All-gather of int8 (scales + K,)."""
        gathered_PL = yield AllGather(sum_K)
        return ops.reshape(self.decode(ops, gathered_PL, size, int8_length(bucket.n, size)), (-1,))[:bucket.n]

    def _sum(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket,
             size: int) -> Generator[Request, Array, tuple[tuple[Array, Array], Array]]:
        """Run the first shot: (the encoded sum of this rank's part, the residual (N,))."""
        n, k = bucket.n, int8_length(bucket.n, size)
        x_PK = as_rows(ops, flat_N + state["residual"], n, size, k)
        wire, left_PK = self.encode(ops, x_PK, size, k)
        # An exchange is not told its rank, so each row carries the number of the rank it is sent to.
        owners = ops.from_host(np.arange(size, dtype=np.int32).view(np.int8).reshape(size, LANE))
        row = [part for p in range(size) for part in (*(w[p] for w in wire), owners[p])]
        received_PL = yield AllToAll(ops.reshape(ops.pack(row), (size, -1)))

        length = k + 4 * blocks(k)
        sum_K = sum_of_rows(ops, self.decode(ops, received_PL[:, :length], size, k), size)
        owner_1 = ops.cast(ops.bitcast(received_PL[0, length:], "int32"), "int64")
        wire, left_1K = self.encode(ops, ops.reshape(sum_K, (1, k)), 1, k)
        is_mine_P1 = ops.reshape(ops.scatter_add(size, owner_1, ops.from_host(np.ones(1, np.float32))), (size, 1))
        return wire, ops.reshape(left_PK + is_mine_P1 * left_1K, (-1,))[:n]

    def encode(self, ops: CompressorOps, x_RK: Array, rows: int, k: int) -> tuple[tuple[Array, Array], Array]:
        """Encode (R, K) -> ((scales as int8 (R, 4 B), elements int8 (R, K)), what is lost (R, K))."""
        x_BL = ops.reshape(x_RK, (rows * blocks(k), -1))
        scale_B = ops.abs_max_rows(x_BL) * (1 / 127)
        q_BL = ops.round(x_BL * ops.reshape(1 / (scale_B + STILL), (-1, 1)))
        lost_BL = x_BL - q_BL * ops.reshape(scale_B, (-1, 1))
        scale_R4 = ops.reshape(ops.bitcast(scale_B, "int8"), (rows, -1))
        return (scale_R4, ops.reshape(ops.cast(q_BL, "int8"), (rows, k))), ops.reshape(lost_BL, (rows, k))

    def decode(self, ops: CompressorOps, wire_RL: Array, rows: int, k: int, count: int = 0) -> Array:
        """Decode int8 (R, 4 B + K) -> float32 (R, K); ``count``: B, 0 for `blocks`."""
        count = count or blocks(k)
        head = 4 * count
        scale_B1 = ops.reshape(ops.bitcast(ops.reshape(wire_RL[:, :head], (-1,)), "float32"), (-1, 1))
        q_BL = ops.reshape(ops.cast(wire_RL[:, head:], "float32"), (rows * count, -1))
        return ops.reshape(q_BL * scale_B1, (rows, k))

    def _piece(self, ops: CompressorOps, received_L: Array, piece: ShardPiece) -> Array:
        """Decode a piece: int8 (nbytes,) -> float32 (elements,)."""
        head, count, n = 4 * (piece.last - piece.first), piece.last - piece.first, piece.end - piece.begin
        before = piece.begin - piece.first * piece.block
        blank = ops.zeros(before, "int8"), ops.zeros(count * piece.block - before - n, "int8")
        whole = ops.pack([received_L[:head], blank[0], received_L[head:head + n], blank[1]])
        return self.decode(ops, ops.reshape(whole, (1, -1)), 1, count * piece.block, count)[0][before:before + n]

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        k = int8_length(bucket.n, size)
        return (size - 1) * (2 * (k + 4 * blocks(k)) + LANE)


@dataclass(frozen=True)
class ShardPiece:
    """Elements [begin, end) of a rank's part that lie in a shard, in blocks [first, last) of ``block`` elements."""

    begin: int
    end: int
    first: int
    last: int
    block: int

    @classmethod
    def of(cls, n: int, shards: Shards, p: int, q: int) -> ShardPiece:
        """Return what of rank ``p``'s part of ``n`` elements lies in rank ``q``'s shard."""
        k = int8_length(n, len(shards.sizes))
        block, end_q = k // blocks(k), shards.ends[q]
        begin, end = max(0, end_q - shards.sizes[q] - p * k), min(k, end_q - p * k)
        return cls(begin, end, begin // block, -(-end // block), block) if begin < end else cls(0, 0, 0, 0, block)

    @property
    def gap(self) -> int:
        """Bytes that fill it up to a multiple of `LANE`."""
        return (self.begin - self.end) % LANE

    @property
    def nbytes(self) -> int:
        """Bytes of its scales, its elements and the gap."""
        return 4 * (self.last - self.first) + self.end - self.begin + self.gap


def blocks(k: int) -> int:
    """Return the blocks in a part of k elements."""
    return -(-k // BLOCK)


def int8_length(n: int, size: int) -> int:
    """Return K: the least that holds ceil(N / P) elements in blocks of equal length, a multiple of 4 (`LANE`)."""
    least = part_length(n, size)
    count = blocks(least)
    return count * (-(-least // (count * LANE)) * LANE)


def make(exchange: config.ExchangeConfig) -> Int8:
    return Int8()
