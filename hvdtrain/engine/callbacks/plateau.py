"""A rate that falls when an evaluation metric no longer improves (``schedule.name: ReduceLROnPlateau``).

Owns which evaluations count and what is refused. The rule itself is the framework's, in `hvdtrain.backends`, which
keeps its state with the optimizer's.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.core.errors import UserError
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.early_stop import need_direction, need_evaluation, value_of
from hvdtrain.engine.callbacks.eval_steps import is_due
from hvdtrain.engine.run import Run


class Plateau(Callback):
    """Gives each evaluation's metric, which is equal on all ranks, to the optimizer of every rank."""

    where = "all"
    steers = True
    state_key = "Plateau"
    before = ("KeepBest", "Checkpoint", "Recorder")

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return run.config.schedule.plateau

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls()

    def fit_start(self, run: Run) -> None:
        """Refuse a run that evaluates nothing or only at its end, and a metric whose direction is not known."""
        schedule = run.config.schedule
        need_evaluation(run, "schedule.metric", schedule.followed)
        if not (run.config.eval_every or run.config.eval_steps):
            raise UserError("schedule.name is ReduceLROnPlateau and eval_every is 0, so that only the last weights are "
                            "evaluated", "evaluations during the run", "set eval_every: 1, or another schedule")
        mode = str(schedule.args.get("mode", "auto"))
        need_direction(run, schedule.followed, mode, ("schedule.metric", "schedule.args.mode"))

    def eval_end(self, run: Run) -> None:
        """Let the optimizers follow an evaluation that a run without a stop would make, too."""
        value = value_of(run, run.config.schedule.followed, "schedule.metric")
        if is_due(run.config, run.state.cursor):
            run.parts.optimizer.evaluated(value)
