"""Compare the ranks' weights every so many steps, and end a run whose ranks train different models."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import numpy as np

from hvdtrain import backends
from hvdtrain.core.comparison import plain_name
from hvdtrain.core.timeline import StepTotals
from hvdtrain.engine.callbacks.base import Callback, several_replicas
from hvdtrain.engine.compare_ranks import kinds
from hvdtrain.engine.run import Run
from hvdtrain.engine.weight_checks import Bits, Diverged, FingerprintRows, Fingerprints, Prints, judge

EARLY = (2, 8)
"""Steps of a fit after which ranks compare besides every so many."""

EVERY = 200
"""Steps between two comparisons with ``check_every: auto``, where they cost no more than `COST`."""

COST = 0.003
"""Part of the time that comparisons may take with ``check_every: auto``."""


class Divergence(Callback):
    """Compares at the start and the end of a fit, after its steps 2 and 8, and every ``every`` steps.

    Ranks that hold the same blocks are compared with each other, of a whole model all ranks. Copies that do not meet in
    every step are compared at the next step in which they do. Raises
    `hvdtrain.engine.weight_checks.Diverged` on every rank.
    """

    where = "all"
    setting = "check_every"
    doing = "comparing the ranks' weights"
    after = ("Ema", "MemoryFit")  # and all callbacks of users: any of them may change weights
    before = ("Checkpoint",)  # so that weights that differ are not saved

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return super().wanted(run) and several_replicas(run)

    def __init__(self, every: int | Literal["auto"]) -> None:
        self._every = every
        self._begin = self._next = self._good = 0
        self._equal: int | None = None
        self._due = self._exact = False
        self._gather_s = math.inf
        self._kinds: list[str] = []
        self._n = 0
        self._some: dict[tuple[int, ...], list[int]] = {}
        self._prints: dict[tuple[int, ...], Fingerprints] = {}

    def fit_start(self, run: Run) -> None:
        self._begin = run.state.cursor.step
        # A further fit continues with what the ranks hold: roundings have added up since the first one began.
        self._equal = min(self._begin, self._begin if self._equal is None else self._equal)
        self._plan(run)
        self._kinds = kinds(run)
        self._exact = run.dp.copies_equal
        self._next = self._begin + (EVERY if self._every == "auto" else self._every)
        self._compare(run)

    def _plan(self, run: Run) -> None:
        """Find what is compared: the parameters that the run trains now."""
        ops, params = backends.load(run.spec.framework).Ops(), run.parts.params
        self._some = {replicas.group.ranks: replicas.params(params.specs) for replicas in run.parts.replicas}
        self._prints = {ranks: Fingerprints(params.specs, params.flat, ops, False, some)
                        for ranks, some in self._some.items()}
        if run.parts.layout is None:
            everyone = tuple(range(run.control.size))
            self._some = {everyone: list(range(len(params.specs)))}
            self._prints = {everyone: Fingerprints(params.specs, params.flat, ops, run.config.model_parallel > 1)}
        self._n = len(params.specs)

    def step_end(self, run: Run) -> None:
        if not self._prints:  # single steps outside of a fit
            return
        step = run.state.cursor.step
        # With zero each element comes from one rank, whatever the sums were.
        self._exact = self._exact and (run.dp.divides_state or run.dp.compressor.same_bits)
        self._due = self._due or step >= self._next or step - self._begin in EARLY
        if self._due and run.state.outcome.met:
            self._compare(run)

    def fit_end(self, run: Run) -> None:
        if run.state.outcome.met and run.state.cursor.step > self._good:
            self._compare(run)

    def _compare(self, run: Run) -> None:
        """Gather the ranks' numbers and judge them; collective."""
        began_s = time.perf_counter()
        if self._n != len(run.parts.params.specs):  # parameters were unfrozen
            self._plan(run)
        step = run.state.cursor.step
        close = len(set(self._kinds)) > 1 or not self._exact
        own = {ranks: prints.prints() if close else prints.digests() for ranks, prints in self._prints.items()}
        own_s = time.perf_counter() - began_s
        rows = run.control.gather((own, own_s, self._gather_s, _step_s(run.timeline.totals)))
        self._gather_s = time.perf_counter() - began_s - own_s
        found = [row[0] for row in rows]
        if not close and any(found[r][ranks] != of for each in found for ranks, of in each.items() for r in ranks):
            close, found = True, run.control.gather({ranks: x.prints() for ranks, x in self._prints.items()})
        if close:
            self._judge(run, found)
        self._good, self._due = step, False
        if step >= self._next or self._every == "auto":
            self._next = step + (self._every if self._every != "auto" else stride(rows))

    def _judge(self, run: Run, prints_P: list[dict[tuple[int, ...], Prints]]) -> None:
        """Raise what the fingerprints of all ranks tell, if they are apart; the same on every rank, so collective where
        a rank knows not all of the model."""
        told = next(filter(None, (self._verdict(run, ranks, [prints_P[rank][ranks] for rank in ranks])
                                  for ranks in self._prints)), None)
        if run.parts.layout is not None:
            told = next(filter(None, run.control.gather(told)), None)
        if told is not None:
            raise told

    def _verdict(self, run: Run, ranks: tuple[int, ...], prints_G: list[Prints]) -> Diverged | None:
        """Return what the fingerprints of ``ranks`` tell, which hold the same tensors."""
        specs, step = [run.parts.params.specs[i] for i in self._some[ranks]], run.state.cursor.step
        sums_GV, norms_GV = np.array([p.sums for p in prints_G]), np.array([p.norms for p in prints_G])
        bits = Bits(np.array([p.bits for p in prints_G], np.uint64), [self._kinds[r] for r in ranks])
        return judge(FingerprintRows(sums_GV, sums_GV, norms_GV), [plain_name(s.name) for s in specs], step,
                     max((_eps(s.dtype) for s in specs), default=0.0), ranks=ranks, bits=bits if self._exact else None,
                     updates=step - (self._equal or 0), cause=lambda *_: self._cause(step))

    def _cause(self, step: int) -> str:
        if step == self._begin:
            return ("the weights differ before the first step of this run: change them on every rank in the "
                    "same way, or where the model is built, and not in a callback of one rank")
        return (f"they were equal after step {self._good}, so something other than the summed gradients changes "
                "them: a callback, task or layer that writes weights on some ranks, different learning rates or "
                "optimizer states, or a faulty device or memory, which `audit: 100` detects. Resume from a checkpoint "
                f"of step {self._good} or before")


def stride(rows: list[tuple[Any, float, float, float]]) -> int:
    """Return the steps to the next comparison, alike on all ranks: `EVERY`, or more where that costs over `COST`. Pure.

    ``rows``: of each rank (anything, its own seconds, those of the gathering before, those of a step).
    """
    own_s, gather_s, step_s = max(r[1] for r in rows), min(r[2] for r in rows), min(r[3] for r in rows)
    spent_s = own_s + (gather_s if math.isfinite(gather_s) else 0.0)
    return max(EVERY, math.ceil(spent_s / (COST * step_s))) if step_s > 0 else EVERY


def _step_s(phases: StepTotals) -> float:
    """Seconds of a step so far, without the first; 0 where there was none."""
    if phases.steps < 2:
        return 0.0
    return (phases.step_s - phases.first_s + phases.seconds["data"]) / (phases.steps - 1)


def _eps(dtype: str) -> float:
    return 2.0 ** -{"float16": 10, "bfloat16": 7, "float64": 52}.get(dtype, 23)
