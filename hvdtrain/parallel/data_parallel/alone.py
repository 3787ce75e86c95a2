"""Strategy of a single replica: nothing is sent, gradients stay where backward makes them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import cast

import numpy as np

from hvdtrain.comm.compressors.none import NoCompression
from hvdtrain.comm.reducer.reducer import OTHER, sum_squares
from hvdtrain.core.protocols import Array, Compressor, Control, Ops, Optimizer, ParamSpec
from hvdtrain.core.protocols.types import Bucket, StepBatch
from hvdtrain.data.weighting import loss_scale
from hvdtrain.parallel.data_parallel.reducing import Whole


class Alone:
    """`hvdtrain.core.protocols.DataParallel` of one rank without compression.

    ``clip_norm``: global norm to clip to, 0: none. ``look``: the update reports the norm. ``decides``: control plane of
    all ranks of a partitioned model. ``fuses``: an optimizer that can be traced updates inside the graph of the
    gradients, and `update` reports the result; `hvdtrain.parallel.data_parallel.create` sets it.
    """

    caveats: tuple[str, ...] = ()
    divides_state = copies_equal = can_change_transport = overlaps = False
    retains = True
    waited_s = 0.0
    in_graph = True
    compression = "none"
    compressor: Compressor = cast(Compressor, NoCompression())
    looks = True
    """False only in the bench that tells what looking at gradients costs."""

    def __init__(self, optimizer: Optimizer, ops: Ops, clip_norm: float = 0.0, look: bool = False,
                 decides: Control | None = None) -> None:
        self.optimizer, self.clip_norm, self.look_first = optimizer, clip_norm, look
        self._whole = None if decides is None else Whole(decides, clip_norm)
        self.fuses = False
        self.buckets: list[Bucket] = []
        self._ops = ops
        self._grads: dict[int, Array] = {}
        self._numbers: Sequence[float] = ()

    @property
    def variant(self) -> int:
        return int(self.fuses)

    def describe(self) -> str:
        return "none"

    def begin(self, step: int) -> None:
        self._grads, self._numbers = {}, ()

    def discard(self) -> None:
        pass

    def scale(self, batch: StepBatch) -> float:
        return loss_scale(batch.weight)

    def meets(self, step: int) -> bool:
        return True

    def buffer(self, bucket: Bucket) -> Array:
        raise AssertionError("gradients of a single rank are in no bucket")

    def put(self, index: int, x: Array) -> None:
        self._grads[index] = x

    def owed(self) -> list[int]:
        return []

    def collect(self) -> list[Array]:
        return [self._grads[i] for i in sorted(self._grads)]

    def look(self, loss_sum: Array, sums: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """Add the update to the graph, if it ``fuses``: numbers (squares, 1 if updated else 0). Else (squares,)."""
        if self.fuses and self.optimizer.traced is not None:
            return self.optimizer.traced(sums, loss_sum, self.clip_norm), []
        return self._ops.reshape(sum_squares(self._ops, sums), (1,)), sums

    def ran(self, sums: Sequence[Array], numbers: Sequence[float]) -> None:
        self._grads, self._numbers = dict(enumerate(sums)), numbers

    def squares(self, grads: Sequence[Array]) -> float:
        """Return the squares of all gradients; 0 if the device decides by itself, which no shard of a model may."""
        if not len(self._numbers):
            if not self.looks or self.optimizer.looks and self._whole is None:
                return 0.0
            self._numbers = [float(sum_squares(self._ops, grads))]
        return float(self._numbers[0])

    def update(self, step: int, grads: Sequence[Array], unused: Collection[int] = ()) -> tuple[bool, float]:
        if self._whole is not None:
            return self._whole.step(self.optimizer, grads, self.buckets, self.squares(grads), unused)
        if len(self._numbers) > 1:
            return bool(self._numbers[1]), math.sqrt(self._numbers[0])
        return self.optimizer.step(grads, self.buckets, self.clip_norm, self.look_first, unused=unused)

    def extend(self, specs: Sequence[ParamSpec], first: int) -> None:
        pass

    def remembered_bytes(self) -> int:
        return 0

    def saved(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, own: dict[str, np.ndarray]) -> str:
        """Report that a compressor's state in ``own`` is not loaded."""
        return OTHER if "compressor.mark" in own else ""

    def restart(self) -> None:
        pass
