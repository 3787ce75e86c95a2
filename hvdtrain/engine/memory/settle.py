"""Measures what this rank needs and has, and settles on its micro-batch and the blocks that it recomputes.

Owns the measuring and the rank's own decision; enters no collective. The decision's rule is `choose`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.machine import memory
from hvdtrain.config.texts import WORDS, wanted
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import BlockCost
from hvdtrain.engine.memory import survey
from hvdtrain.engine.memory.survey import Scene
from hvdtrain.planning.linear import Line, fit
from hvdtrain.planning.memory import options
from hvdtrain.planning.memory.fit import Fit, MemoryRoom, choose, in_parts, peak, scaled
from hvdtrain.planning.memory.forecast import Sharding, forecast

if TYPE_CHECKING:
    from hvdtrain.engine.run import Run

MOST_OFF = 0.1
"""Part by which the bytes that recomputing saves may be less than reckoned before blocks are chosen anew."""

SEEN_FROM = 1 << 24
"""Bytes from which a saving shows in what a process holds; on hosts smaller ones drown in its heap."""


@dataclass(frozen=True)
class Own:
    """What a rank has settled on. ``samples``: its part of a step. ``free``: bytes that it may hold, None: unknown.

    ``costs``: of the blocks it could recompute, for a micro-batch. ``predicted``, ``measured``: bytes that recomputing
    the chosen ones saved in a trial of ``tried`` samples; 0 where it was none.
    """

    fit: Fit
    samples: int
    free: int | None
    costs: tuple[BlockCost, ...] = ()
    predicted: int = 0
    measured: int = 0
    tried: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-able."""
        fit = self.fit
        return {"samples": self.samples, "micro_batch": fit.micro_batch, "micro_batches": fit.parts, "need": fit.need,
                "free": self.free, "need_then": fit.choice.peak, "fits": fit.choice.fits,
                "recomputed": list(fit.choice.names), "recompute_s": fit.choice.seconds,
                "blocks": [asdict(cost) for cost in self.costs], "tried_samples": self.tried,
                "saved_predicted": self.predicted, "saved_measured": self.measured}


class Settling:
    """A rank on its way to a decision: measured once, decided as often as the ranks' agreement asks for.

    ``micro``, ``remat``: whether the configuration leaves the one and the other to it. ``cap``: samples that no
    micro-batch may exceed, 0 for none: the configuration's, or what once ran out of memory.
    """

    def __init__(self, scene: Scene, way: Sharding, micro: bool, remat: bool, cap: int = 0) -> None:
        self._scene, self._way, self._micro, self._cap = scene, way, micro, cap
        self._remat = scene.parts.remat if remat else None
        if self._remat is not None:
            self._remat.choose(())
        self.samples, self._least_parts = _samples(scene, cap)
        self._facts = facts = survey.facts_of(scene, way)
        if self.samples:  # else there is nothing to compute, and BatchNorm could not with one sample
            measured = survey.measure(scene, facts.model, way, self._remat is not None)
            self._facts = replace(facts, measured=measured)
        timed = micro and self._remat is not None and self.samples > 0
        self._room = MemoryRoom(self.need, facts.rank.free_bytes, self._costs, self._line()
                                if timed else Line(0.0, 1e-9))

    def need(self, micro_batch: int) -> int:
        """Return the bytes that this rank holds in all with nothing recomputed."""
        rank = self._facts.rank
        parts = max(rank.micros, -(-self.samples // max(1, micro_batch)))
        return forecast(replace(self._facts, rank=replace(rank, micro_batch=micro_batch, micros=parts))).total

    def decide(self, parts: int = 0) -> Own:
        """Return what is best: in ``parts`` micro-batches where they are given, else in as many as is best.

        The blocks are chosen and tried, and chosen anew where they save less than was reckoned.
        """
        for _ in range(2):
            fit = self._decided(parts)
            own = self._tried(fit)
            if own.measured >= (1 - MOST_OFF) * own.predicted:
                break
            self._worth(max(0.0, own.measured / own.predicted))
        return own

    def keeps(self, micro_batch: int) -> bool:
        """Return whether a micro-batch that an earlier part of this run had still fits here, with ``remat`` at most."""
        if not self.samples or not micro_batch:
            return True
        return in_parts(self._room, self.samples, -(-self.samples // micro_batch)).choice.fits

    def _decided(self, parts: int) -> Fit:
        n, room = self.samples, self._room
        if parts:
            return in_parts(room, n, parts)
        # BatchNorm takes no statistics of one sample.
        least = 2 if self._scene.parts.caveats() and n > 1 else 1
        most = max(self._least_parts, n // least) if self._micro else self._least_parts
        return choose(room, n, self._least_parts, most)

    def _costs(self, micro_batch: int) -> list[BlockCost]:
        return options.costs(self._facts, micro_batch)

    def _tried(self, fit: Fit) -> Own:
        """Choose the fit's blocks, and see in a small trial what they save."""
        measured, micro = self._facts.measured, fit.micro_batch
        costs = tuple(self._costs(micro)) if micro else ()
        own = Own(fit, self.samples, self._room.free, costs)
        if self._remat is None:
            return own
        n = measured.block_samples
        small = scaled(measured.blocks, 1.0)
        predicted = sum(cost.saved_bytes for cost in small if cost.name in fit.choice.names)
        shows = not measured.with_gradients or self._scene.device.kind != "cpu" or predicted >= SEEN_FROM
        if not fit.choice.names or not shows:
            self._remat.choose(fit.choice.names)
            return own
        whole = survey.pass_bytes(self._scene, n)
        self._remat.choose(fit.choice.names)
        less = survey.pass_bytes(self._scene, n)
        return replace(own, predicted=whole - peak(small, fit.choice.names, whole), measured=whole - less,
                       tried=n)

    def _worth(self, factor: float) -> None:
        """Take every block's saving for ``factor`` of what was reckoned."""
        measured = self._facts.measured
        blocks = tuple(replace(cost, saved_bytes=int(factor * cost.saved_bytes)) for cost in measured.blocks)
        self._facts = replace(self._facts, measured=replace(measured, blocks=blocks))
        assert self._remat is not None
        self._remat.choose(())

    def _line(self) -> Line:
        """Seconds of a micro-batch, by those that were tried for their memory: graphs of these sizes are there."""
        most = self._facts.measured.block_samples
        sizes = sorted({max(1, most // 2), most})
        return fit(sizes, [_seconds(self._scene, n) for n in sizes])


def reckoned(scene: Scene, way: Sharding) -> Callable[[int], int] | None:
    """Return what this process holds at most, by the samples of a micro-batch, as it is before anything is recomputed.

    None where there is ample room, so that nothing more than a small pass has to be measured.
    """
    facts = survey.facts_of(scene, way)
    if survey.roughly_fits(scene, facts):
        return None
    facts = replace(facts, measured=survey.measure(scene, facts.model, way))
    return lambda n: memory.imported_bytes() + forecast(replace(facts, rank=replace(facts.rank, micro_batch=n))).total


def _samples(scene: Scene, cap: int) -> tuple[int, int]:
    """(this rank's samples of a step, the fewest micro-batches that the configuration allows)."""
    feed = scene.feed
    n_global = feed.global_batch if feed.samples is None else min(feed.global_batch, feed.samples)
    cut = feed.cut_at(scene.cursor.step)
    low, high = cut.offsets(n_global)[feed.rank:feed.rank + 2].tolist()
    n = high - low
    parts = max(1, min(cut.accumulate_P[feed.rank], n))
    return n, max(parts, -(-n // cap)) if cap else parts


def _seconds(scene: Scene, n: int) -> float:
    """The shorter of two trials."""
    batch, found = scene.sample(n), []
    for _ in range(3):  # the first one may trace a graph
        begin = time.perf_counter()
        scene.parts.stage.trial(batch)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def settle(run: Run, backend: Any) -> None:
    """Have the model of this rank recompute the blocks that the configuration asks for. Not collective.

    Errors: `UserError` for names that the model does not have, and for a block that cannot be recomputed exactly.
    """
    text, remat = run.config.remat, run.parts.remat
    of_keras = any(cls.__module__.startswith("keras.") for cls in type(run.spec.model).__mro__)
    if of_keras and run.spec.framework == "torch":
        _refuse_keras(text)
    names = wanted(text, [] if remat is None else remat.names)
    if remat is None or not names:
        return
    for name in names:
        why = remat.refusal(name)
        if why:
            raise UserError(f"remat: block {name} cannot be recomputed exactly: {why}", "blocks without that",
                            "leave it out of remat, or set remat: auto, which does")
    remat.choose(names)


def _refuse_keras(text: str | list[str]) -> None:
    """Raise `UserError` for blocks of a Keras model that PyTorch computes: its seed generators are Keras' own."""
    if text not in WORDS:
        raise UserError(f"remat is {text!r} with a Keras model on PyTorch",
                        "a model of PyTorch's own, or Keras on TensorFlow",
                        "set remat: off, or KERAS_BACKEND=tensorflow")
