"""Weights & Biases: ``trackers: [wandb]`` or ``[wandb:PROJECT]``; its files are in ``wandb/`` of the run's directory.

Online where W&B finds a key, else offline, for `wandb sync`; ``WANDB_MODE`` and the other variables of W&B hold. Its id
is kept in ``wandb.id``, so that a resumed run continues with its curves. Curves are drawn over the trainer's own steps,
which may go back to a checkpoint; W&B's count of calls may not.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from hvdtrain.core.protocols import Record, RecordedRun
from hvdtrain.core.records import numbers, settings
from hvdtrain.reports.trackers import CLOSE_S, kept

MODULE = PACKAGE = "wandb"
ARGUMENT, MEANS = r"[^/\\#?%:]*", ", or wandb:PROJECT"
APART_S = 1.0  # a step costs 160 us of CPU here, more in the process of W&B


class Wandb:
    """Logs to one W&B run."""

    def __init__(self, run: RecordedRun, project: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it calls its makers, offline too
        import wandb

        self._wandb, self._run, self._project, self._ended = wandb, run, project, False
        self._to: Any = None

    def write(self, record: Record) -> None:
        self._ended |= record.event == "end"
        self._to = self._to or self._begin()
        if words := settings(record):
            self._to.config.update(words, allow_val_change=True)
        if found := numbers(record):
            self._to.log({**found, "step": record.step})

    def _begin(self) -> Any:
        out, wandb = self._run.out, self._wandb
        mode = None if os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False) else "offline"
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True,
                               x_disable_machine_info=True, init_timeout=CLOSE_S / 2, finish_timeout=CLOSE_S / 2)
        own_id = kept(out / "wandb.id", lambda: uuid.uuid4().hex[:8])
        began = wandb.init(
            dir=str(out), id=own_id, resume="allow", mode=mode, settings=quiet, name=out.name,
            project=self._project or os.environ.get("WANDB_PROJECT", "hvdtrain"))
        began.define_metric("step", hidden=True)
        began.define_metric("*", step_metric="step")
        return began

    def close(self) -> None:
        """Finish; what is not uploaded after some seconds stays on disk for `wandb sync`."""
        if self._to is not None:
            self._to.finish(exit_code=0 if self._ended else 1)
