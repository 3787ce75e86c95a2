"""A rank that computes slower than it could, for tests and benches where no control group may slow it down.

Owns the stretching alone. The stage inside knows nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hvdtrain.core.protocols import Batch, Cargo, GradientSink, Pair, PipelineStage, Stage

T = TypeVar("T")


class Slowed:
    """``stage`` computing at ``speed`` (0 to 1) of its own speed; an `hvdtrain.core.protocols.Stage`.

    After each forward and backward it sleeps, so that own computing takes 1/speed of its time; time in which the stage
    waited for other ranks is not stretched. Everything else is the stage's own.
    """

    def __init__(self, stage: Stage, speed: float) -> None:
        assert 0 < speed <= 1, speed
        self._stage, self._rest = stage, 1.0 / speed - 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        """The stage's own, stretched."""
        begin, waited_s = time.perf_counter(), sink.waited_s
        pair = self._stage.run(micro, scale, final, sink)
        self._sleep(time.perf_counter() - begin - self._stage.waited_s - (sink.waited_s - waited_s))
        return pair

    def trial(self, batch: Batch) -> None:
        """The stage's own, stretched."""
        self._stretched(self._stage.trial, batch)

    # Of a stage of a pipeline, which waits for nobody meanwhile.

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        """The stage's own, stretched."""
        return self._stretched(self._pipelined.forward, chunk, micro, came, batch)

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        """The stage's own, stretched."""
        return self._stretched(self._pipelined.loss, chunk, micro, came, batch, scale)

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        """The stage's own, stretched."""
        return self._stretched(self._pipelined.backward, chunk, micro, came)

    @property
    def _pipelined(self) -> PipelineStage:
        return cast(PipelineStage, self._stage)

    def _stretched(self, work: Callable[..., T], *args: Any) -> T:
        begin = time.perf_counter()
        value = work(*args)
        self._sleep(time.perf_counter() - begin)
        return value

    def _sleep(self, own_s: float) -> None:
        time.sleep(max(0.0, own_s) * self._rest)
