"""Base of the strategies that sum gradients by a reducer in every step, and the update of a shard of the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.core.buckets import more_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Array, Compressor, Control, Ops, Optimizer, ParamSpec
from hvdtrain.core.protocols.types import Bucket, StepBatch
from hvdtrain.data.weighting import loss_scale
from hvdtrain.parallel.parts import ModelParts


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


class Whole:
    """Update of a shard of the model by the norm of the whole gradient, so that no rank decides by its own shard.

    ``control``: of all ranks. ``clip_norm``: norm to clip to, 0: none. The agreement of the step has found all finite.
    """

    def __init__(self, control: Control, clip_norm: float) -> None:
        self._control, self._clip_norm = control, clip_norm

    def step(self, optimizer: Optimizer, grads: Sequence[Array], buckets: Sequence[Bucket],
             squares: float, unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update by ``optimizer``, clipped, collectively, by all ranks' ``squares``; return (finite, norm)."""
        norm = self.norm(squares) if self._clip_norm > 0 else math.nan
        return optimizer.step(grads, buckets, self._clip_norm, False, norm, unused)

    def norm(self, squares: float) -> float:
        """Return the norm of the whole gradient, added in float64 in the order of the ranks; collective."""
        return math.sqrt(float(self._control.sum(np.array([squares]))[0]))


class UnusedParameters:
    """The parameters of ``parts`` that no rank used in the latest step, as indices: ``agreed``.

    ``control``: of all ranks. A rank's own set is the same in most steps, so the ranks gather their sets only in a step
    in which one of them has another set than it gathered last, by the agreement of the step (`changed`).
    ``never``: parameters that no step so far has used; None before the first step.
    """

    def __init__(self, parts: ModelParts, control: Control) -> None:
        specs = parts.params.specs
        self.names = [spec.name for spec in specs]
        self._control = control
        self._groups: Sequence[tuple[Sequence[int], Sequence[int]]] = [
            (each.group.ranks, each.params(specs)) for each in parts.replicas] or [
            (range(control.size), range(len(specs)))]
        self._whole = not parts.replicas
        # Ranks of a pipeline number their own blocks' parameters, each from 0; Keras counts names within a process.
        blocks = [spec.block for spec in specs]
        self._keys: Sequence[int | tuple[int, int]] = range(len(specs)) if self._whole else [
            (block, blocks[:i].count(block)) for i, block in enumerate(blocks)]
        self.agreed: frozenset[int] = frozenset()
        self.never: frozenset[int] | None = None
        self._own: frozenset[int] = frozenset()
        self._gathered: frozenset[int] = frozenset()

    def changed(self, own: frozenset[int]) -> bool:
        """Take this rank's unused parameters of a step; return whether the ranks have to gather."""
        self._own = own
        return own != self._gathered

    def gather(self) -> None:
        """Find the agreed set; collective, entered by all ranks in a step in which one of them has `changed`."""
        self._gathered = self._own
        rows = self._control.gather({self._keys[i] for i in self._own})
        self.agreed = frozenset(i for ranks, params in self._groups for i in params
                                if all(self._keys[i] in rows[rank] for rank in ranks))

    def check(self, unused: frozenset[int]) -> None:
        """Raise `UserError`, on all ranks alike, where a step has used no parameter of an unpartitioned model."""
        if self._whole and self.names and len(unused) == len(self.names):
            raise without_gradient()

    def updated(self, unused: frozenset[int]) -> None:
        """Note that a step has made its update without the parameters ``unused``."""
        self.never = unused if self.never is None else self.never & unused


def without_gradient() -> UserError:
    """Return the error of a loss that depends on no trainable parameter."""
    return UserError("task returned a loss that depends on no parameter of the model", "a loss "
                     "with a gradient", "compute it from model(x), without detach(), .item() or no_grad")
