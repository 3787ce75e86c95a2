"""Controller of ``balance: auto``: from each rank's compute seconds to a better plan, or to none. Pure.

It is fed the same numbers on every rank, once per window of steps, and answers the same, bit for bit (no logarithms:
they depend on the processor). Rank r's factor is f_r = measured / line_r. Of it the controller keeps:

- a *level*, the running mean, in which the line counts as `TRUST` windows;
- the *noise*, from the ratios of a rank's successive windows, over all ranks. A factor beyond 1 + `BAND` times the
  noise is out of band: once it is an outlier; in the same direction in each of the last ``lasting`` windows it is a
  change, and the level follows at once. A drastic change shows in the latest steps of a window, for which ``closer``
  asks for shorter windows.

A new plan is returned if it is predicted to be more than ``margin`` faster by the levels, and was so in each of the
last ``lasting`` windows with the factors out of band taken at face value. A plan followed before wins if it is about as
good: a framework may have traced graphs for its sizes. From the second plan on that did not make the measured step
shorter, each doubles the windows between plans, up to `LONGEST_WAIT` times ``lasting``. A rank without samples keeps
its level for `REST` windows, then the level returns towards 1 by `RETURN` of the way at each, so that it is tried
again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from hvdtrain.core.errors import count
from hvdtrain.planning.batch.plan import BatchPlan, Ceilings, Parts, RankShare, of_shares, plan, predicted
from hvdtrain.planning.linear import LinearTime

TRUST = 0.5
"""Windows that the probe's line is worth. Under a quota, or while other jobs start, a probe is wrong by up to a sixth;
windows of training differ by a few per cent."""

MEMORY = 20
"""A level is the mean of about the last so many windows."""

BAND = 3.0
"""Standard deviations from the level beyond which one window counts as an outlier, and several as a change."""

DRASTIC = 1.0
"""A change is drastic from twice as long, or half, on; and beyond `BAND` standard deviations of single steps."""

HOLD, MOST_HELD = 0.02, 8
"""Part of a step that a plan which was followed before may lose against the best one, and how many are kept: the first,
because a framework keeps the graphs of the sizes that came first."""

QUIET, NOISE = 0.01, 0.08
"""Least standard deviation that is believed, and the one expected before there is evidence."""

TO_SIGMA = 1.4826
"""From the median of absolute deviations to the standard deviation of a normal distribution."""

EXPECTED_WINDOWS, NOISE_WINDOWS = 3, 32
"""Windows that the expectation is worth, and windows that noise is looked for in."""

REST, RETURN = 30, 0.1
"""Windows that a rank without samples keeps its level, and the part of the way back to 1 that it goes in each more."""

LONGEST_WAIT = 32
"""The back-off's bound, in units of ``lasting`` windows."""


class Rebalancer:
    """Controller of ``balance: auto``: decides from the ranks' compute times when another plan is worth it.

    ``lines_P``, ``n``, ``ceilings_P``, ``least_parts``, ``same_parts``: as for `hvdtrain.planning.batch.plan.plan`.
    ``plan``: the one in force. ``margin``: fraction of a step that a new plan has to save, in ``lasting`` windows.
    ``closer``: whether the next window should be shorter, to confirm a drastic change or the plan made after one.
    """

    def __init__(self, lines_P: Sequence[LinearTime], n: int, ceilings_P: Ceilings, plan: BatchPlan,
                 margin: float = 0.05,
                 lasting: int = 2, least_parts: Parts = 1, same_parts: bool = False) -> None:
        assert len(lines_P) == len(plan.parts) and margin >= 0 and lasting >= 1
        self.base_P, self.n, self.ceilings_P, self.plan = list(lines_P), n, ceilings_P, plan
        self.margin, self.lasting, self.least_parts, self.same_parts = margin, lasting, least_parts, same_parts
        size = len(lines_P)
        self._level_P = [1.0] * size                    # factors
        self._weight_P: list[float] = [TRUST] * size    # windows in each level
        self._idle_P = [0] * size                       # windows without samples
        self._recent_P: list[deque[float]] = [deque(maxlen=lasting) for _ in lines_P]
        self._jumps: deque[list[float]] = deque(maxlen=NOISE_WINDOWS)
        self._sigma = NOISE                             # relative, of a factor, between windows
        self._latest: deque[float] = deque([NOISE] * EXPECTED_WINDOWS * size, maxlen=NOISE_WINDOWS * size)
        self._drastic_from = DRASTIC                    # of how far latest steps were from the level, those above
        self._won = 0                                   # successive windows in which another plan would have won
        self._steps: deque[float] = deque(maxlen=lasting)
        self._before_s = 0.0                            # the measured step before the last plan; 0: judged or none
        self._failed = 0                                # plans that made no step shorter
        self._since = LONGEST_WAIT * lasting            # windows since the last plan
        self._held = [plan]                             # plans that were followed
        self.closer = False
        self._moved = False                             # a level was taken from a short window since the last plan
        self._short = 0                                 # short windows still to come after such a plan

    @property
    def factors_P(self) -> list[float]:
        """Time of each rank relative to its first line."""
        return list(self._level_P)

    @property
    def lines_P(self) -> list[LinearTime]:
        """Current estimate of the lines."""
        return [line.scaled(factor) for line, factor in zip(self.base_P, self.factors_P)]

    def observe(self, compute_s_P: Sequence[float], samples_P: Sequence[int], parts_P: Sequence[int],
                latest_s_P: Sequence[float] = ()) -> BatchPlan | None:
        """Take in one window; return the plan to follow from now on, or None.

        ``compute_s_P``: each rank's own seconds per step without waiting, the median over the window; ``samples_P``,
        ``parts_P``: of a full step in it. ``latest_s_P``: as ``compute_s_P``, of the window's latest steps alone.
        Seconds that are not above 0 or not finite count as not measured.
        """
        self._sigma = self._noise()
        self._drastic_from = max(DRASTIC, BAND * TO_SIGMA * statistics.median(self._latest))
        self._jumps.append([])
        latest_s_P = latest_s_P or compute_s_P
        quick_P = [self._see(rank, *seen) for rank, seen in enumerate(zip(compute_s_P, samples_P, parts_P, latest_s_P))]
        self._since += 1
        self._judge(max((s for s in compute_s_P if math.isfinite(s)), default=0.0))
        found, gain = self._best(self._level_P)
        quick_gain = gain if quick_P == self._level_P else self._best(quick_P)[1]
        self._won = self._won + 1 if quick_gain > self.margin else 0
        wait = self.lasting * min(2 ** max(0, self._failed - 1), LONGEST_WAIT)
        if self._since > 2 * wait:
            self._failed = 0
        startled = any(samples and self._drastic(latest_s / line.seconds(samples, parts), level)
                       for latest_s, samples, parts, line, level
                       in zip(latest_s_P, samples_P, parts_P, self.base_P, self._level_P))
        self._short = max(0, self._short - 1)
        self.closer = startled or self._short > 0
        if startled or self._won < self.lasting or gain <= self.margin or self._since < wait:
            return None
        self._short, self._moved = self.lasting if self._moved else 0, False
        self.closer = self._short > 0
        self._before_s = statistics.fmean(self._steps)
        self.plan, self._won, self._since = found, 0, 0
        self._steps.clear()
        if len(self._held) < MOST_HELD and not any(found.same(held) for held in self._held):
            self._held.append(found)
        return found

    def lower(self, ceilings_P: Sequence[int]) -> BatchPlan:
        """Take lower ceilings; return the plan in force under them: the same samples, in more micro-batches."""
        self.ceilings_P = list(ceilings_P)
        self.plan = of_shares(self.lines_P, self.n, self.plan.samples_P, self.ceilings_P, self.least_parts,
                              self.same_parts)
        self._held = [self.plan]  # what was followed before is beyond them, or may be
        return self.plan

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: lines, factors with the windows behind them, the plan and the brake."""
        parts = [[p.samples, p.micro_batch, p.accumulate, p.predicted_s] for p in self.plan.parts]
        return {"lines": [[line.a_s, line.c_s] for line in self.base_P], "n": self.n, "factors": self.factors_P,
                "weights": list(self._weight_P), "idle": list(self._idle_P), "plan": parts, "failed": self._failed}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Undo `state_dict`; return why it cannot be used here and nothing was loaded, or ""."""
        if len(state["lines"]) != len(self.base_P):
            return f"the plan was made for {count(len(state['lines']), 'rank')}, these are {len(self.base_P)}"
        if state["n"] != self.n:
            return f"the plan was made for {count(state['n'], 'sample')} a step, these are {self.n}"
        parts = tuple(RankShare(*part) for part in state["plan"])
        for rank, (part, ceiling) in enumerate(zip(parts, self.ceilings_P or [None] * len(parts))):
            if ceiling and part.micro_batch > ceiling:
                return f"rank {rank} holds {count(ceiling, 'sample')}, the plan has micro-batches of {part.micro_batch}"
        self.base_P = [LinearTime(*line) for line in state["lines"]]
        self.plan = BatchPlan(parts, max(part.predicted_s for part in parts))
        self._held = [self.plan]
        self._level_P = [float(factor) for factor in state["factors"]]
        self._weight_P, self._idle_P = list(state["weights"]), list(state["idle"])
        self._failed, self._won, self._before_s = state["failed"], 0, 0.0
        self._recent_P = [deque(maxlen=self.lasting) for _ in self.base_P]
        self._steps.clear()
        return ""

    def _see(self, rank: int, compute_s: float, samples: int, parts: int, latest_s: float) -> float:
        """Move a rank's level by one window; return its latest factor."""
        line_s = self.base_P[rank].seconds(samples, parts)
        if samples == 0:
            return self._rest(rank)
        if not (math.isfinite(compute_s) and compute_s > 0 and line_s > 0):
            return self._level_P[rank]
        self._idle_P[rank] = 0
        level, recent, band = self._level_P[rank], self._recent_P[rank], BAND * self._sigma
        now = compute_s / line_s
        latest = latest_s / line_s
        hint = self._drastic(latest, level) and not self._drastic(now, level)  # it may have begun within the window
        now = latest if hint else now
        if math.isfinite(latest) and latest > 0:
            self._latest.append(abs(_off(latest, level)))
        if recent:
            self._jumps[-1].append(abs(_off(now, recent[-1])))
        recent.append(now)
        offs = [_off(value, level) for value in recent]
        if abs(offs[-1]) <= band:
            self._weight_P[rank] = min(self._weight_P[rank] + 1, MEMORY)
            self._level_P[rank] += (now - level) / self._weight_P[rank]
            return self._level_P[rank]
        if len(offs) == self.lasting and (min(offs) > band or max(offs) < -band) and not hint:
            if self._drastic(now, level):  # the window before may be from while it began
                self._level_P[rank], self._weight_P[rank], self._moved = now, 1, True
            elif not any(self._drastic(value, level) for value in recent):  # else that one was an outlier
                self._level_P[rank], self._weight_P[rank] = statistics.fmean(recent), self.lasting
        return now

    def _drastic(self, factor: float, level: float) -> bool:
        """Return whether ``factor`` was measured and is too far from ``level`` to be noise."""
        return math.isfinite(factor) and factor > 0 and abs(_off(factor, level)) > self._drastic_from

    def _rest(self, rank: int) -> float:
        """Keep the level of a rank without samples for a while, then let it return to 1."""
        self._idle_P[rank] += 1
        self._recent_P[rank].clear()
        if self._idle_P[rank] > REST:
            self._level_P[rank] -= RETURN * (self._level_P[rank] - 1.0)
            self._weight_P[rank] = TRUST
        return self._level_P[rank]

    def _noise(self) -> float:
        """Return the relative standard deviation of a factor between windows."""
        seen = [jump for jumps in self._jumps for jump in jumps]
        to_sigma = TO_SIGMA / math.sqrt(2.0)  # of differences
        expected = [NOISE / to_sigma] * (EXPECTED_WINDOWS * len(self.base_P))
        return max(QUIET, to_sigma * statistics.median(seen + expected))

    def _best(self, level_P: Sequence[float]) -> tuple[BatchPlan, float]:
        """Return (the best plan by these levels or one about as good that was followed, its gain)."""
        lines_P = [line.scaled(level) for line, level in zip(self.base_P, level_P)]
        best = plan(lines_P, self.n, self.ceilings_P, self.least_parts, self.same_parts)
        held = min((predicted(old, lines_P) for old in self._held), key=lambda old: old.step_s)
        if held.step_s <= best.step_s * (1.0 + min(HOLD, self.margin)):
            best = held
        now_s = predicted(self.plan, lines_P).step_s
        return best, now_s / best.step_s - 1.0 if best.step_s > 0 else 0.0

    def _judge(self, step_s: float) -> None:
        """Note a window's step; ``lasting`` windows after a plan, whether it made the step shorter."""
        self._steps.append(step_s)
        if self._before_s and len(self._steps) == self.lasting:
            self._failed += statistics.fmean(self._steps) >= self._before_s
            self._before_s = 0.0


def _off(factor: float, level: float) -> float:
    """Return the distance of ``factor`` from ``level``: 1 for twice as long, -1 for half."""
    return factor / level - 1.0 if factor >= level else 1.0 - level / factor
