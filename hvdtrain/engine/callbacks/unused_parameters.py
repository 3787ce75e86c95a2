"""Reports once, by name, the parameters that none of the first steps has used."""

from __future__ import annotations

from hvdtrain.core.comparison import plain_name
from hvdtrain.core.errors import count, some
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run

FIRST_STEPS = 10
"""Steps after which the report comes; earlier where an epoch has fewer."""
SHOWN = 5
"""Names in the report."""


class UnusedReport(Callback):
    """Runs on all ranks: of a pipeline each has parameters of its own."""

    where = "all"

    def __init__(self) -> None:
        self._steps = 0
        self._reported = False

    def step_end(self, run: Run) -> None:
        """Report after the first steps. Collective."""
        self._steps += 1
        if self._steps == FIRST_STEPS:
            self._report(run)

    def epoch_end(self, run: Run) -> None:
        """Report after an epoch of fewer steps. Collective."""
        self._report(run)

    def fit_end(self, run: Run) -> None:
        """Report at the end of a shorter run. Collective."""
        self._report(run)

    def _report(self, run: Run) -> None:
        if self._reported or not self._steps:
            return
        self._reported = True
        frozen: frozenset[int] = getattr(run.parts.facts, "frozen", frozenset())  # before Keras' first step
        never = (run.unused.never or frozenset()) - run.parts.params.frozen() - frozen
        names = [plain_name(run.unused.names[i]) for i in sorted(never)]
        if run.parts.layout is not None:  # else all ranks have found the same
            names = list(dict.fromkeys(name for row in run.control.gather(names) for name in row))
        if names:
            run.note(f"no step so far has used {count(len(names), 'trainable parameter')} ({some(names, SHOWN)}): "
                     "without a gradient they are not updated")
