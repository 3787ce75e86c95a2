"""Writes a checkpoint while the run waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hvdtrain.checkpoint.snapshot import Snapshot
from hvdtrain.checkpoint.store import CheckpointStore
from hvdtrain.errors import UserError
from hvdtrain.protocols.state import Outcome


class InlineSaver:
    """Writes into ``root`` and keeps the newest ``keep``; what is to be said about that goes to ``log``."""

    def __init__(self, root: Path, keep: int, log: Callable[[str], None]) -> None:
        self._store, self._log = CheckpointStore(root, keep), log
        self._settled: list[Outcome] = []

    def save(self, step: int, snapshot: Snapshot) -> None:
        """Write ``snapshot``, or note why it cannot be written."""
        error = ""
        try:
            self._store.save(snapshot, step, log=self._log)
        except (OSError, UserError) as problem:
            error = str(problem)
        self._settled.append(Outcome(step, error))

    def settled(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        outcomes, self._settled = self._settled, []
        return outcomes

    def wait(self) -> None:
        """Return at once: a save is over when `save` returns."""
