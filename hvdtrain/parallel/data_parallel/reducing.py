"""Base of the strategies that sum gradients by a reducer in every step, and the update of a shard of the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.core.buckets import more_buckets
from hvdtrain.core.protocols import Array, Compressor, Control, Ops, Optimizer, ParamSpec
from hvdtrain.data.weighting import loss_scale

if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import Bucket, StepBatch


class Reducing:
    """Members of `hvdtrain.core.protocols.DataParallel` that follow from ``reducer``."""

    caveats: tuple[str, ...] = ()
    divides_state = False
    copies_equal = False  # whoever exchanges in every step says so

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.buckets: list[Bucket] = reducer.buckets
        self.in_graph: bool = reducer.collectives.in_graph

    def _extended(self, specs: Sequence[ParamSpec], first: int) -> Reducer:
        """Return a reducer that has buckets for the parameters from ``first`` on too, with the compressor's state."""
        old = self.reducer
        made = Reducer([*old.buckets, *more_buckets(old.buckets, specs, first)], old.compressor, old.collectives,
                       old.ops, old.ops_of_place, old.among)
        made.state.take_over(old.state)
        return made

    @property
    def variant(self) -> int:
        return self.reducer.stage

    @property
    def compression(self) -> str:
        return self.reducer.compressor.name

    @property
    def compressor(self) -> Compressor:
        return self.reducer.compressor

    @property
    def ops(self) -> Ops:
        return self.reducer.ops

    def describe(self) -> str:
        return self.reducer.compressor.describe()

    def discard(self) -> None:
        self.reducer.state.discard()

    def scale(self, batch: StepBatch) -> float:
        """Return 1 / W of the whole batch, or of this rank's share for a compressor that needs each rank's own mean."""
        return loss_scale(batch.own_weight if self.reducer.compressor.own_mean else batch.weight)

    def meets(self, step: int) -> bool:
        return True

    def owed(self) -> list[int] | None:
        return self.reducer.owed()

    @property
    def overlaps(self) -> bool:
        return False

    @property
    def can_change_transport(self) -> bool:
        return False

    def remembered_bytes(self) -> int:
        return self.reducer.state.nbytes()

    def saved(self) -> dict[str, np.ndarray]:
        return self.reducer.state.saved()

    def restore(self, own: dict[str, np.ndarray]) -> str:
        return self.reducer.state.restore(own)

    def restart(self) -> None:
        self.reducer.state.restart()


if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import Bucket


class Whole:
    """Update of a shard of the model by the norm of the whole gradient, so that no rank decides by its own shard.

    ``control``: of all ranks. ``clip_norm``: norm to clip to, 0: none. The agreement of the step has found all finite.
    """

    def __init__(self, control: Control, clip_norm: float) -> None:
        self._control, self._clip_norm = control, clip_norm

    def step(self, optimizer: Optimizer, grads: Sequence[Array], buckets: Sequence[Bucket],
             squares: float, unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update by ``optimizer``, clipped by the norm of the ranks' ``squares`` together; collective if it clips.

        Returns (finite, norm) as `Optimizer.step`.
        """
        norm = self.norm(squares) if self._clip_norm > 0 else math.nan
        return optimizer.step(grads, buckets, self._clip_norm, False, norm, unused)

    def norm(self, squares: float) -> float:
        """Return the norm of the whole gradient, added in float64 in the order of the ranks; collective."""
        return math.sqrt(float(self._control.sum(np.array([squares]))[0]))
