"""Every so many steps, epochs or seconds: whose turn it is when a step has ended."""

from __future__ import annotations

import math
import re
import time

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import RecordedRun


class Turns:
    """Says at which steps it is somebody's turn who wants ``every``: "50 step", "2 epoch", "5 s", "" each.

    ``got``: what a `UserError` says of an ``every`` that means nothing. ``clock``: seconds may be meant, as on rank 0
    alone, since clocks differ. ``due``: what `ask` has returned last.
    """

    def __init__(self, every: str, got: str, clock: bool = True) -> None:
        self.due = True
        self._last = -math.inf
        count, _, self._unit = every.partition(" ")
        if every and (not re.fullmatch(r"\d+(\.\d+)?" if self._unit == "s" else r"\d+", count) or float(count) == 0
                      or self._unit not in ("step", "epoch", *(["s"] if clock else []))):
            raise UserError(got, "'N step', 'N epoch', or, on root only, 'N s'",
                            "correct it")
        self._count = float(count or 0)

    def ask(self, run: RecordedRun) -> bool:
        """Return whether it is its turn after the step that has just ended; ask once a step."""
        if self._unit == "step":
            self.due = run.state.cursor.step % int(self._count) == 0
        elif self._unit == "epoch":
            left = run.feed.steps_left(run.state.cursor)
            self.due = left == 0 and (run.state.cursor.epoch + 1) % int(self._count) == 0
        elif self._unit == "s":
            now = time.monotonic()
            self.due = now - self._last >= self._count
            self._last = now if self.due else self._last
        return self.due
