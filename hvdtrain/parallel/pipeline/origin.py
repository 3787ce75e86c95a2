"""Search for the first number that is not finite in a model partitioned over ranks.

All ranks of a copy repeat the step together, and each compares the input and output of its chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.core.comparison import Origin, finite, plain_name
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import Batch, Cargo, Pair, PipelineStage
from hvdtrain.planning.pipeline.orders import FORWARD, Action


class Places:
    """Numbers and ranks of the chunks next to those of this rank."""

    def __init__(self, layout: Layout) -> None:
        mesh = layout.mesh
        self._ranks, self._depth, self._place = mesh.ranks, mesh.depth, mesh.place
        self.own, self.all = len(layout.mine), len(layout.chunks())

    def number(self, chunk: int) -> int:
        """Return the copy's number of this rank's chunk."""
        return chunk * self._depth + self._place

    def last(self, action: Action) -> bool:
        """Return whether ``action`` is the forward of the copy's last chunk."""
        return action.phase == FORWARD and self.number(action.chunk) == self.all - 1

    def before(self, action: Action) -> int | None:
        """Return the chunk whose output ``action`` needs; None if it needs the batch or the loss."""
        number = self.number(action.chunk) + (-1 if action.phase == FORWARD else 1)
        return number if 0 <= number < self.all else None

    def behind(self, action: Action) -> int | None:
        """Return the chunk that needs the output of ``action``; None without one."""
        number = self.number(action.chunk) + (1 if action.phase == FORWARD else -1)
        return number if 0 <= number < self.all else None

    def rank(self, number: int) -> int:
        """Return the rank of a chunk."""
        return self._ranks[number % self._depth]


class Looking:
    """`PipelineStage` that checks the input and output of the chunks of ``stage``.

    ``first``: turn of the earliest action with finite input and an output that is not; None without one. ``came_bad``:
    whether the input of a backward was not finite.
    """

    def __init__(self, stage: PipelineStage, places: Places) -> None:
        self._stage, self._places = stage, places
        self.first: int | None = None
        self.came_bad = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        gave = self._stage.forward(chunk, micro, came, batch)
        self._look(self._places.number(chunk), _good(came), _good(gave))
        return gave

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        pair = self._stage.loss(chunk, micro, came, batch, scale)
        self._look(self._places.number(chunk), _good(came), bool(np.isfinite(float(pair[0]))))
        self.came_bad = self.came_bad or not _good(came)
        return pair

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        gave = self._stage.backward(chunk, micro, came)
        self._look(self.turn_back(chunk), _good(came), _good(gave))
        self.came_bad = self.came_bad or not _good(came)
        return gave

    def turn_back(self, chunk: int) -> int:
        """Return the turn of a chunk's backward."""
        return 2 * self._places.all - 1 - self._places.number(chunk)

    def origin(self, name: str, blocks: str) -> Origin | None:
        """Return the origin on this rank, None without one; ``name``: its first bad gradient, in ``blocks``."""
        if self.first is None and (self.came_bad or not name):
            return None
        what = f"the gradient of {plain_name(name)}" if name else f"what comes out of {blocks}"
        return Origin(self.turn_back(0) if self.first is None else self.first, what)

    def _look(self, turn: int, good: bool, still: bool) -> None:
        if good and not still and (self.first is None or turn < self.first):
            self.first = turn


def _good(cargo: Cargo | None) -> bool:
    """Return whether all of a cargo is finite."""
    return cargo is None or all(finite(f"#{dtype.partition(':')[0]}", array)
                                for array, dtype in zip(cargo.arrays, cargo.dtypes))
