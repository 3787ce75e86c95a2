"""Where in a copy of a model that is cut over ranks a number is first not finite.

No rank can compute its part of a step alone. So all ranks of a copy compute it once more, each looks at what comes into
its chunks and what they give, and the one is named that made the first bad number out of good ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.core.comparison import Origin, finite, spoken
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import Batch, Cargo, Pair, PipelineStage
from hvdtrain.planning.pipeline.orders import FORWARD, Action


class Places:
    """Where the chunks before and behind those of this rank are."""

    def __init__(self, layout: Layout) -> None:
        mesh = layout.mesh
        self._ranks, self._depth, self._place = mesh.ranks, mesh.depth, mesh.place
        self.own, self.all = len(layout.mine), len(layout.chunks())

    def number(self, chunk: int) -> int:
        """The copy's number of this rank's chunk ``chunk``."""
        return chunk * self._depth + self._place

    def last(self, action: Action) -> bool:
        """Whether it is the forward of the copy's last chunk."""
        return action.phase == FORWARD and self.number(action.chunk) == self.all - 1

    def before(self, action: Action) -> int | None:
        """The copy's chunk that gives what ``action`` needs; None where the batch or the loss does."""
        number = self.number(action.chunk) + (-1 if action.phase == FORWARD else 1)
        return number if 0 <= number < self.all else None

    def behind(self, action: Action) -> int | None:
        """The copy's chunk that needs what ``action`` gives; None where no other does."""
        number = self.number(action.chunk) + (1 if action.phase == FORWARD else -1)
        return number if 0 <= number < self.all else None

    def rank(self, number: int) -> int:
        """The rank that has the copy's chunk ``number``."""
        return self._ranks[number % self._depth]


class Looking:
    """`PipelineStage` that looks at what comes into the chunks of ``stage`` and what they give.

    ``first``: the turn of the earliest action that gave a number which is not finite though none came; None if none
    did. ``came_bad``: whether one came into a backward.
    """

    def __init__(self, stage: PipelineStage, places: Places) -> None:
        self._stage, self._places = stage, places
        self.first: int | None = None
        self.came_bad = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        """As the stage does."""
        gave = self._stage.forward(chunk, micro, came, batch)
        self._look(self._places.number(chunk), _good(came), _good(gave))
        return gave

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        """As the stage does."""
        pair = self._stage.loss(chunk, micro, came, batch, scale)
        self._look(self._places.number(chunk), _good(came), bool(np.isfinite(float(pair[0]))))
        self.came_bad = self.came_bad or not _good(came)
        return pair

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        """As the stage does."""
        gave = self._stage.backward(chunk, micro, came)
        self._look(self.turn_back(chunk), _good(came), _good(gave))
        self.came_bad = self.came_bad or not _good(came)
        return gave

    def turn_back(self, chunk: int) -> int:
        """The turn of a chunk's backward."""
        return 2 * self._places.all - 1 - self._places.number(chunk)

    def origin(self, name: str, blocks: str) -> Origin | None:
        """Return what began here, of which the first bad gradient is ``name``'s, in ``blocks``; None if nothing did."""
        if self.first is None and (self.came_bad or not name):
            return None
        what = f"the gradient of {spoken(name)}" if name else f"what comes out of {blocks}"
        return Origin(self.turn_back(0) if self.first is None else self.first, what)

    def _look(self, turn: int, good: bool, still: bool) -> None:
        if good and not still and (self.first is None or turn < self.first):
            self.first = turn


def _good(cargo: Cargo | None) -> bool:
    """Whether all of it is finite; so is nothing."""
    return cargo is None or all(finite(f"#{dtype.partition(':')[0]}", array)
                                for array, dtype in zip(cargo.arrays, cargo.dtypes))
