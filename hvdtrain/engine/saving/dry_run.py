"""Try before the first step what a run otherwise writes at its end only: callback states, final files, the record.

Owns what is tried. No weights are written or copied, so that a large model costs no more than a small one: whether
an array can be stored follows from its type, and a Keras model's description is made in memory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import UserError
from hvdtrain.engine import summary
from hvdtrain.engine.saving.contents import callback_states

if TYPE_CHECKING:
    from hvdtrain.engine.run import Run


def check(run: Run) -> None:
    """Raise `UserError` on every rank for what rank 0 could not write at the end; note what it will leave out.

    Collective.
    """
    control = run.control
    run.call("saving")
    remark = control.bcast(agreed(control, lambda: _tried(run) if control.rank == 0 else "", "trying the final files"))
    if remark:
        run.note(remark)


def _tried(run: Run) -> str:
    """Try all; return what will be left out, or ""; rank 0's part."""
    for name in (RunDirectory.CHECKPOINTS, RunDirectory.MODEL):
        _check_folder(run.out / name)
    callback_states(run)
    try:
        json.dumps(summary.record(run), default=str)
    except Exception as error:  # noqa: BLE001  (parts of the user's, such as transforms, tell of themselves in it)
        raise UserError(f"the record of the finished run, completed.json, cannot be made: {type(error).__name__}: "
                        f"{error}", "describe() of transforms and other parts of one's own to return texts",
                        "correct the part that the message names") from error
    return "" if run.parts.layout is not None else run.parts.state.try_export()


def _check_folder(path: Path) -> None:
    if os.path.lexists(path) and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
        raise UserError(f"{path} is {'not writable' if path.is_dir() else 'not a folder'}",
                        "a folder that this run may write into", "move it away, or choose another --out")
