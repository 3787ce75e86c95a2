"""The update of a rank that has a part of the model alone: from the norm of the whole gradient, which all ranks know.

Owns that no rank decides by its own part. The vote of the step has found all of it finite; here it is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.protocols import Array, Control, Optimizer

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
