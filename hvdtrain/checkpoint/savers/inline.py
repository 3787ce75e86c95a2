"""Does the work of a checkpoint while the run waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.state import Outcome


class InlineSaver:
    """Implements `hvdtrain.core.protocols.state.Saver` in the thread that calls it."""

    def __init__(self) -> None:
        self._settled: list[Outcome] = []

    def save(self, step: int, work: Callable[[], None]) -> None:
        """Call ``work``, or note why it cannot be done; what is not about the disk or the state is raised."""
        begin, error = time.perf_counter(), ""
        try:
            work()
        except (OSError, UserError) as problem:
            error = str(problem)
        self._settled.append(Outcome(step, error, time.perf_counter() - begin))

    def settled(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        outcomes, self._settled = self._settled, []
        return outcomes

    def wait(self, timeout_s: float) -> bool:
        """Return True at once: a save is over when `save` returns."""
        return True

    def end(self) -> None:
        """There is no thread."""
