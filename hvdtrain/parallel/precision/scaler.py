"""The factor that keeps float16 gradients off zero and infinity, the same on every rank of a job.

Owns the number and when it moves. A rank that computes in float16 multiplies its loss by it, and divides its own
gradients by it again, in float32, before they are exchanged: no other rank, wire or compressor ever sees a scaled
one. A gradient that is not finite on one rank makes the sum so on all, and a loss that is not finite is voted on:
every rank feeds `LossScale.update` the same facts, so that all skip the same step and no further vote is needed.
Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2 and appendix.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

MOST = 2.0**24


class LossScale:
    """A power of two: halved (not below 1) when gradients overflow, doubled after ``growth_interval`` clean steps.

    ``value``: the first. ``ranks``: those that compute in float16; without any it never moves and scales nothing.
    ``skipped``: steps that were left out so far because they overflowed.
    """

    def __init__(self, value: float = 1.0, ranks: Collection[int] = (), growth_interval: int = 2000) -> None:
        self.value = self._first = float(value)
        self.skipped = 0
        self._ranks = frozenset(ranks)
        self._growth_interval = growth_interval
        self._clean = 0

    @property
    def on(self) -> bool:
        """Whether some rank scales, so that every rank has to look whether gradients are finite."""
        return bool(self._ranks)

    def of(self, rank: int) -> float:
        """What ``rank`` multiplies its loss by."""
        return self.value if rank in self._ranks else 1.0

    def update(self, bad: Collection[int]) -> bool:
        """Take note of a step: ``bad`` are the ranks that were not finite (all, where the sum of gradients was not).

        Returns True for an overflow: the scale is smaller now, and the step no more than left out. False for a clean
        step, and for one that a smaller scale would not mend: only ranks that do not scale were bad, or the scale is
        1 already.
        """
        if not self._ranks:
            return False
        if not bad:
            self._clean += 1
            if self._clean == self._growth_interval:
                self.value, self._clean = min(2 * self.value, MOST), 0
            return False
        if not self._ranks & set(bad) or self.value <= 1:
            return False
        self.value, self._clean = self.value / 2, 0
        self.skipped += 1
        return True

    def describe(self) -> dict[str, str]:
        """For the summary, in words; nothing where no rank scales."""
        if not self.on:
            return {}
        left = f", {self.skipped} step{'' if self.skipped == 1 else 's'} left out as overflowed" if self.skipped else ""
        return {"loss scale": f"{self.value:g}{left}"}

    def state(self) -> dict[str, Any]:
        """JSON-able state for a checkpoint: under the key "loss_scale"; {} where no rank scales."""
        return {"loss_scale": [self.value, self._clean, self.skipped]} if self.on else {}

    def restart(self) -> None:
        """Start from the first value again, as where another one is configured than in the run that is resumed."""
        self.value, self._clean = self._first, 0

    def load(self, rest: dict[str, Any]) -> None:
        """Undo `state`; nothing changes where no rank scales, or none did when the state was kept."""
        if self.on and "loss_scale" in rest:
            value, clean, skipped = rest["loss_scale"]
            self.value, self._clean, self.skipped = float(value), int(clean), int(skipped)
