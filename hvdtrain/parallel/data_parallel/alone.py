"""One copy of the model: nothing is sent, gradients stay in the shape and place where backward makes them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hvdtrain.comm.compressors.none import NoCompression
from hvdtrain.comm.reducer.reducer import OTHER, sum_squares
from hvdtrain.core.protocols import Array, Compressor, Control, Ops, Optimizer, ParamSpec
from hvdtrain.data.weighting import loss_scale
from hvdtrain.parallel.data_parallel.reducing import Whole

if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import Bucket, StepBatch


class Alone:
    """`hvdtrain.core.protocols.DataParallel` of one rank without compression.

    ``clip_norm``: global norm to clip to, 0: none. ``look``: the update is to tell the norm. ``decides``: the control
    plane of all ranks, where this one has a part of the model alone. ``fuses``: an optimizer that can be traced updates
    inside the graph that computes the gradients, and `update` merely tells what became of it;
    `hvdtrain.parallel.data_parallel.create` sets it where nothing of a user's stands between gradients and update.
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
        """Whether the graph updates."""
        return int(self.fuses)

    def describe(self) -> str:
        """Nothing travels."""
        return "none"

    def begin(self, step: int) -> None:
        """Forget the gradients of the step before."""
        self._grads, self._numbers = {}, ()

    def discard(self) -> None:
        """Nothing: there is no state."""

    def scale(self, batch: StepBatch) -> float:
        """1 / W."""
        return loss_scale(batch.weight)

    def meets(self, step: int) -> bool:
        """True: the vote of one rank decides as that of many does."""
        return True

    def buffer(self, bucket: Bucket) -> Array:
        """Never asked for: there are no buckets."""
        raise AssertionError("gradients of one rank lie in no bucket")

    def put(self, index: int, x: Array) -> None:
        """Take the gradient of parameter ``index``, in its own shape."""
        self._grads[index] = x

    def owed(self) -> list[int]:
        """Nothing."""
        return []

    def collect(self) -> list[Array]:
        """The gradients by parameter."""
        return [self._grads[i] for i in sorted(self._grads)]

    def look(self, loss_sum: Array, sums: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """Add the update to the graph, if it ``fuses``: numbers (squares, 1 if updated else 0). Else (squares,)."""
        if self.fuses and self.optimizer.traced is not None:
            return self.optimizer.traced(sums, loss_sum, self.clip_norm), []
        return self._ops.reshape(sum_squares(self._ops, sums), (1,)), sums

    def ran(self, sums: Sequence[Array], numbers: Sequence[float]) -> None:
        """Take a graph's results."""
        self._grads, self._numbers = dict(enumerate(sums)), numbers

    def squares(self, grads: Sequence[Array]) -> float:
        """Of all gradients; 0 where a device looks at them by itself, which it may not with a part of the model."""
        if not len(self._numbers):
            if not self.looks or self.optimizer.looks and self._whole is None:
                return 0.0
            self._numbers = [float(sum_squares(self._ops, grads))]
        return float(self._numbers[0])

    def update(self, step: int, grads: Sequence[Array], unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update, or tell of the update that the graph has made."""
        if self._whole is not None:
            return self._whole.step(self.optimizer, grads, self.buckets, self.squares(grads), unused)
        if len(self._numbers) > 1:
            return bool(self._numbers[1]), math.sqrt(self._numbers[0])
        return self.optimizer.step(grads, self.buckets, self.clip_norm, self.look_first, unused=unused)

    def extend(self, specs: Sequence[ParamSpec], first: int) -> None:
        """Nothing: there are no buckets."""

    def remembered_bytes(self) -> int:
        """0."""
        return 0

    def saved(self) -> dict[str, np.ndarray]:
        """Nothing."""
        return {}

    def restore(self, own: dict[str, np.ndarray]) -> str:
        """Say that a compressor's state, of which ``own`` has some, is not taken."""
        return OTHER if "compressor.mark" in own else ""

    def restart(self) -> None:
        """Nothing to forget."""
