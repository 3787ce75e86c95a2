"""Unfreezes at the start of an epoch what the key ``freeze`` has frozen until then.

The backends freeze while a model's parts are made, and `hvdtrain.engine.model_changes` follows what changes here.
"""

from __future__ import annotations

from hvdtrain.core.comparison import plain_name
from hvdtrain.core.errors import count, some
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run
from hvdtrain.planning.freezing import unfreezing


class Freeze(Callback):
    """Runs on all ranks: each freezes and unfreezes the same layers in its model, without asking the others."""

    where = "all"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(unfreezing(run.config.freeze))

    def __init__(self) -> None:
        self._set = False

    def epoch_start(self, run: Run) -> None:
        """Set what this epoch trains, also in the middle of an epoch where a run resumes."""
        epoch, facts = run.state.cursor.epoch, run.parts.facts
        if facts is None or self._set and epoch not in unfreezing(run.config.freeze):
            return
        self._set = True
        names = facts.set_frozen(epoch)
        if names:  # else the framework's parameters join at the next step, which prints a note
            shown = some([plain_name(name) for name in names])
            run.note(f"step {run.state.cursor.step}: {count(len(names), 'unfrozen parameter')} ({shown}) join "
                     "training")
        for caveat in run.parts.caveats() if run.control.size > 1 else ():
            note = f"not independent of the number of ranks: {caveat}"
            if note not in run.notes:
                run.note(note)
