"""What every callback shares: who runs it, how often, and the method per event."""

from __future__ import annotations

import math
import re
import time
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.events import Event


class Callback:
    """Base of callbacks: define a method named like an event (``step_end(run)``) to see it.

    ``where``: "root" runs on rank 0 only and must not enter a collective; "all" runs on every rank.
    ``every`` thins out STEP_END: "50 step", "2 epoch", or "5 s" (root only, since clocks differ); "" is each time.
    """

    where = "root"
    every = ""
    _last_turn = -math.inf

    def on(self, event: Event, run: Any) -> None:
        """Call the method of this event, if there is one and it is its turn."""
        method = getattr(self, event.value, None)
        if method is not None and (event is not Event.STEP_END or self._turn(run)):
            method(run)

    def _turn(self, run: Any) -> bool:
        if not self.every:
            return True
        count, _, unit = self.every.partition(" ")
        if not re.fullmatch(r"\d+(\.\d+)?" if unit == "s" else r"\d+", count) or float(count) == 0:
            unit = "?"
        if unit == "step":
            return run.state.cursor.step % int(count) == 0
        if unit == "epoch":
            left = run.feed.steps_left(run.state.cursor)
            return left == 0 and (run.state.cursor.epoch + 1) % int(count) == 0
        if unit == "s" and self.where == "root":
            now = time.monotonic()
            due = now - self._last_turn >= float(count)
            if due:
                self._last_turn = now
            return due
        raise UserError(f"{type(self).__name__}.every is {self.every!r} with where={self.where!r}",
                        "'N step', 'N epoch', or, on root only, 'N s'", "correct it")

    def saving(self, run: Any) -> None:
        """Bring together what `state_dict` will tell, before each save; collective with ``where`` "all"."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state to keep in a checkpoint; rank 0's is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""

    def restored(self, run: Any) -> None:
        """See the run between `load_state_dict` and the return of what each rank owns, such as compressor state."""
