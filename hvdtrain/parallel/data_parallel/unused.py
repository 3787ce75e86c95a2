"""Agreement of the ranks on unused parameters, to which no sample of the global batch gave a gradient.

Unused parameters are not updated, as in one process (`hvdtrain.core.protocols.Optimizer.step`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.parallel.parts import ModelParts


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
    return UserError("task returned a loss that no parameter of the model has a part in", "a loss to take the "
                     "gradient of", "compute it from model(x), without detach(), .item() or no_grad")
