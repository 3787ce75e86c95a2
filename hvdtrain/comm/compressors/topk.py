"""`topk`: the entries of largest magnitude only; the others wait in the residual.

Owns the error feedback, the momentum correction and the warm-up of Deep Gradient Compression (Lin et al., ICLR 2018).
How the largest are found is the backends' (`CompressorOps.topk`).
"""

from __future__ import annotations

import math

from hvdtrain import config
from hvdtrain.comm.compressors.base import CompressorOps, Stateless
from hvdtrain.core import protocols
from hvdtrain.core.protocols import AllGather, AllToAllV, Array, Exchange
from hvdtrain.core.protocols.types import Bucket, Shards

WARMUP_STAGES = 4
"""The warm-up sends 1/4, 1/16, 1/64 and 1/256 of the entries, never less than the ratio (section 3.3 of the paper)."""


class TopK(Stateless):
    """Sends ``ratio`` of each bucket's entries: pairs of index and value, gathered and added up in rank order.

    State, v (N,) and with momentum also u (N,); g is this rank's gradient, m the momentum::

        u = m u + g,  v = v + u      (without momentum: v = v + g)
        send the k of v that are largest in magnitude, then set u and v to zero where they were sent

    So momentum is applied before the choice ("momentum correction") and is forgotten where it has been sent ("momentum
    factor masking"); the optimizer must then be SGD without a momentum of its own.
    """

    name, numerics = "topk", "lossy: largest entries"
    bytes_share, same_bits = 0.05, True
    auto_order = 5

    def __init__(self, ratio: float = 0.01, momentum: float = 0.0, warmup_steps: int = 0) -> None:
        assert 0 < ratio <= 1 and 0 <= momentum < 1 and warmup_steps >= 0, (ratio, momentum, warmup_steps)
        self.ratio, self.momentum, self.warmup_steps = ratio, momentum, warmup_steps
        self.own_momentum = f"exchange.topk_momentum {momentum:g}" if momentum else ""
        self.not_auto = "exchange.topk_momentum changes the optimizer, which auto never does" if momentum else ""
        larger = [0.25 ** (s + 1) for s in range(WARMUP_STAGES) if 0.25 ** (s + 1) > ratio]
        self.ratios = (*(larger if warmup_steps else ()), ratio)

    def describe(self) -> str:
        momentum = f", momentum {self.momentum:.12g}" if self.momentum else ""
        warmup = f", warm-up {self.warmup_steps} steps" if self.warmup_steps else ""
        return f"topk {100 * self.ratio:.12g} %{momentum}{warmup}"

    def stage(self, step: int) -> int:
        """Return the index in ``ratios`` at ``step``: each quarter of the warm-up has its own, while above ratio."""
        if step >= self.warmup_steps:
            return len(self.ratios) - 1
        return min(WARMUP_STAGES * step // self.warmup_steps, len(self.ratios) - 1)

    def k(self, n: int, stage: int | None = None) -> int:
        """Return the entries sent of n; at least one, which also carries the news of what is not finite."""
        return min(n, max(1, math.ceil(self.ratios[-1 if stage is None else stage] * n)))

    def init(self, ops: protocols.Ops, bucket: Bucket) -> dict[str, Array]:
        names = ("residual", "momentum") if self.momentum else ("residual",)
        return {name: ops.zeros(bucket.n, "float32") for name in names}

    def exchange(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """All-gather int32 (2 k,): indices, then the bits of the values."""
        k = self.k(bucket.n, stage)
        values_k, index_k, new = self._chosen(ops, flat_N, state, k)
        # As integers: the bits of an index may read as a signalling NaN, which a move of floats may change.
        pairs_PK = yield AllGather(ops.pack([ops.cast(index_k, "int32"), ops.bitcast(values_k, "int32")]))
        index_Pk = ops.cast(ops.reshape(pairs_PK[:, :k], (size, k)), "int64")
        values_Pk = ops.reshape(ops.bitcast(ops.reshape(pairs_PK[:, k:], (-1,)), "float32"), (size, k))
        return ops.scatter_add(bucket.n, index_Pk, values_Pk), new

    def scatter(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array], bucket: Bucket, shards: Shards,
                stage: int = 0) -> Exchange:
        """All-gather of how many entries go to whom, int32 (P,); all-to-all of pairs, each to the shard it lies in."""
        k, n = self.k(bucket.n, stage), shards.sizes[shards.rank]
        values_k, index_k, new = self._chosen(ops, flat_N, state, k)
        order_k, counts_P = ops.by_part(index_k, shards.ends)
        pairs_2k = ops.pack([ops.cast(ops.take(index_k, order_k), "int32"),
                             ops.bitcast(ops.take(values_k, order_k), "int32")])
        counts_PP = yield AllGather(counts_P)
        got_P = counts_PP[:, shards.rank]
        pairs = ops.reshape(ops.transpose(ops.reshape(pairs_2k, (2, k))), (-1,))
        pairs_M2 = ops.reshape((yield AllToAllV(pairs, counts_P * 2, got_P * 2)), (-1, 2))
        index_M = ops.cast(pairs_M2[:, 0], "int64") - shards.own.start
        values_M = ops.bitcast(ops.reshape(pairs_M2[:, 1], (-1,)), "float32")
        total_K, at = ops.zeros(n, "float32"), 0
        for p in range(len(shards.sizes)):  # in the order of the ranks
            end = at + got_P[p]
            total_K = ops.plus(total_K, ops.scatter_add(n, index_M[at:end], values_M[at:end]))
            at = end
        return total_K, new

    def _chosen(self, ops: CompressorOps, flat_N: Array, state: dict[str, Array],
                k: int) -> tuple[Array, Array, dict[str, Array]]:
        u_N = state["momentum"] * self.momentum + flat_N if self.momentum else flat_N
        v_N = state["residual"] + u_N
        values_k, index_k = ops.topk(v_N, k)
        # 0, or NaN if anything is not finite: it reaches every rank whether or not it is among the largest.
        values_k = values_k + ops.sum_squares(v_N) * 0.0
        new = {"residual": ops.drop(v_N, index_k)}
        if self.momentum:
            new["momentum"] = ops.drop(u_N, index_k)
        return values_k, index_k, new

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        return (size - 1) * 8 * self.k(bucket.n, stage)


def make(exchange: config.ExchangeConfig) -> TopK:
    return TopK(exchange.topk_ratio, exchange.topk_momentum, exchange.topk_warmup_steps)
