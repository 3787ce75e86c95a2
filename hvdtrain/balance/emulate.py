"""A rank that computes slower than it could, for tests and benches where no control group may slow it down.

Owns the stretching alone. The step inside knows nothing of it.
"""

from __future__ import annotations

import time
from typing import Any

from hvdtrain.protocols import Batch, Pair


class Slowed:
    """``step``, an `hvdtrain.protocols.Step`, computing at ``speed`` (0 to 1) of its own speed.

    After each forward and backward it sleeps, so that own computing takes 1/speed of its time; time in which the step
    waited for other ranks is not stretched. Everything else is the step's own.
    """

    def __init__(self, step: Any, speed: float) -> None:
        assert 0 < speed <= 1, speed
        self._step, self._rest = step, 1.0 / speed - 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def forward_backward(self, batch: Batch, scale: float, last: bool) -> Pair:
        """The step's own, stretched."""
        begin = time.perf_counter()
        pair = self._step.forward_backward(batch, scale, last)
        self._sleep(time.perf_counter() - begin - self._step.waited_s)
        return pair

    def trial(self, batch: Batch) -> None:
        """The step's own, stretched."""
        begin = time.perf_counter()
        self._step.trial(batch)
        self._sleep(time.perf_counter() - begin)

    def _sleep(self, own_s: float) -> None:
        time.sleep(max(0.0, own_s) * self._rest)
