"""What ways of data parallelism have in common that sum gradients by a reducer, in every step."""

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
    """Part of `hvdtrain.core.protocols.DataParallel` that is ``reducer``'s: its compressor with the state of that.

    No decision of an owner or of all ranks is in here.
    """

    caveats: tuple[str, ...] = ()
    divides_state = False
    copies_equal = False  # whoever exchanges in every step says so

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.buckets: list[Bucket] = reducer.buckets
        self.in_graph: bool = reducer.collectives.in_graph

    def _extended(self, specs: Sequence[ParamSpec], first: int) -> Reducer:
        """Return a reducer with buckets for the parameters from ``first`` on too, and the compressor's state so far."""
        old = self.reducer
        made = Reducer([*old.buckets, *more_buckets(old.buckets, specs, first)], old.compressor, old.collectives,
                       old.ops, old.ops_of_place, old.among)
        made.state.take_over(old.state)
        return made

    @property
    def variant(self) -> int:
        """The compressor's stage of warm-up."""
        return self.reducer.stage

    @property
    def compression(self) -> str:
        """The compressor's name."""
        return self.reducer.compressor.name

    @property
    def compressor(self) -> Compressor:
        """The reducer's."""
        return self.reducer.compressor

    @property
    def ops(self) -> Ops:
        """The reducer's."""
        return self.reducer.ops

    def describe(self) -> str:
        """The compressor with its settings."""
        return self.reducer.compressor.describe()

    def discard(self) -> None:
        """Take compressor state back to where the step began; nothing else has changed."""
        self.reducer.state.discard()

    def scale(self, batch: StepBatch) -> float:
        """1 / W of the whole batch, or of this rank's part for a compressor that wants each rank's own mean."""
        return loss_scale(batch.own_weight if self.reducer.compressor.own_mean else batch.weight)

    def meets(self, step: int) -> bool:
        """True: in every step."""
        return True

    def owed(self) -> list[int] | None:
        """What the reducer has not begun."""
        return self.reducer.owed()

    @property
    def overlaps(self) -> bool:
        """False: whoever puts a bucket may have to wait for other ranks."""
        return False

    @property
    def can_change_transport(self) -> bool:
        """False: what it made is for one transport."""
        return False

    def remembered_bytes(self) -> int:
        """Of the compressor's state."""
        return self.reducer.state.nbytes()

    def saved(self) -> dict[str, np.ndarray]:
        """Compressor state."""
        return self.reducer.state.saved()

    def restore(self, own: dict[str, np.ndarray]) -> str:
        """Undo `saved`; state of other buckets or another compressor starts anew, which is said."""
        return self.reducer.state.restore(own)

    def restart(self) -> None:
        """Forget compressor state."""
        self.reducer.state.restart()


if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import Bucket


class Whole:
    """The gradient of all ranks together. ``control``: of all of them; ``clip_norm``: norm to clip to, 0: none."""

    def __init__(self, control: Control, clip_norm: float) -> None:
        self._control, self._clip_norm = control, clip_norm

    def step(self, optimizer: Optimizer, grads: Sequence[Array], buckets: Sequence[Bucket],
             squares: float, unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update by ``optimizer``, clipped by the norm that the ranks' ``squares`` make together; collective if so.

        Returns (finite, norm) as `Optimizer.step`.
        """
        norm = self.norm(squares) if self._clip_norm > 0 else math.nan
        return optimizer.step(grads, buckets, self._clip_norm, False, norm, unused)

    def norm(self, squares: float) -> float:
        """Return the norm of the whole gradient, added in float64 in the order of the ranks; collective."""
        return math.sqrt(float(self._control.sum(np.array([squares]))[0]))
