"""Stop, or skip the update on every rank, where a loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.core.errors import UserError
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run

ALONE_FINITE = "; each rank's own gradient is finite: the loss is not, or the sum, its norm or compression overflows"


class NanGuard(Callback):
    """Runs on all ranks, which all see the same event: ``mode`` "stop" ends the run, "skip" allows some in a row.

    When the event comes, this step's update has not been made, on any rank: loss and summed gradient are looked at
    before it. On a GPU a loss is read one step late, and with "stop" the device itself leaves the update out.
    """

    where = "all"
    state_key = "NanGuard"

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls(run.config.nan_guard, run.config.max_skipped)

    def __init__(self, mode: str, max_skipped: int) -> None:
        self._mode, self._max = mode, max_skipped
        self.in_a_row = 0
        self.skipped = 0
        self._last = -2

    def non_finite(self, run: Run) -> None:
        step = run.state.cursor.step
        self.in_a_row = self.in_a_row + 1 if step == self._last + 1 else 1
        self._last = step
        self.skipped += 1
        ranks = ", ".join(str(r) for r in run.state.outcome.bad_ranks)
        where = _where(run.state.outcome.bad_where) or ("" if run.parts.stage.asynchronous else ALONE_FINITE)
        if self._mode == "stop" or self.in_a_row > self._max:
            many = f" ({self.in_a_row} steps in a row)" if self.in_a_row > 1 else ""
            seen = "detected one step late" if run.parts.stage.asynchronous else "that step's update was not made"
            raise UserError(f"loss or gradient is not finite at step {step} on rank {ranks}{many}; {seen}{where}",
                            "finite numbers",
                            "lower lr, set clip_norm, check the data of that step, or set nan_guard: skip"
                            ).of_kind("non_finite")
        run.note(f"step {step}: loss or gradient not finite on rank {ranks}, update skipped on every rank{where}")

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "skipped": self.skipped, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.skipped, self._last = state["in_a_row"], state["skipped"], state["last"]


def _where(found: dict[int, str]) -> str:
    if len(set(found.values())) == 1:
        return f"; first there: {next(iter(found.values()))}"
    words = ", ".join(f"{where} on rank {rank}" for rank, where in found.items())
    return f"; first there: {words}" if words else ""
