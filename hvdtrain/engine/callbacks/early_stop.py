"""Best evaluation of a metric: keep its checkpoint, end a run that no longer improves, end it with the best weights.

Which checkpoints are removed is left to `hvdtrain.checkpoint.store`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.pairs import is_known, metric_of
from hvdtrain.checkpoint import CheckpointError, CheckpointStore, OpenCheckpoint, read_snapshot
from hvdtrain.checkpoint.downloads import resume_path
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.checkpoint.transfer import Groups, fetch
from hvdtrain.cluster.control import agreed
from hvdtrain.config import Config
from hvdtrain.config import EarlyStopConfig as Settings
from hvdtrain.core.errors import UserError, count, nearest
from hvdtrain.core.protocols import ModelState
from hvdtrain.core.protocols.run import ArrayWindow, Head, Want
from hvdtrain.core.resolve import absolute
from hvdtrain.engine.average import GROUP
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.checkpoint import TOPIC
from hvdtrain.engine.callbacks.eval_steps import is_due, metric_name
from hvdtrain.engine.run import Run
from hvdtrain.engine.run_parts import BestEvaluation
from hvdtrain.engine.saving import held_by

CANDIDATES = 3
"""Best evaluations kept for each metric: the save of the newest, or of the one before, may be known to fail later."""


def _sign(metric: str, mode: str) -> float:
    """Return 1 where larger values of ``metric`` are better, else -1."""
    return 1.0 if (metric_of(metric).better if mode == "auto" else mode) == "max" else -1.0


def need_direction(run: Run, metric: str, mode: str, keys: tuple[str, str]) -> None:
    """Raise `UserError` for a ``metric`` object of unknown direction. Collective: one stage may know it."""
    undirected, (of_set, slash, rest) = getattr(run.parts.evaluator, "undirected", None), metric.partition("/")
    own = rest if slash and of_set in run.eval_feeds else metric
    if mode == "auto" and not is_known(own) and run.control.agree(undirected is not None and undirected(own)):
        raise UserError(f"{keys[0]} is {metric} and whether larger values of {metric} are better is not known",
                        f"{keys[1]}: min or max", f"set {keys[1]}")


def value_of(run: Run, metric: str, key: str) -> float:
    """Return what was evaluated of ``metric``; `UserError` where nothing was."""
    if metric not in run.state.metrics:
        raise UserError(f"{key} {metric!r} is not evaluated", nearest(metric, run.state.metrics), f"correct {key}")
    return run.state.metrics[metric]


def need_evaluation(run: Run, key: str, *metrics: str) -> None:
    """Raise `UserError` where nothing is evaluated, or none of ``metrics``, as far as the names are known."""
    if not run.eval_feeds:
        raise UserError(f"{key} is set and there is no evaluation data", "a test split",
                        f"add one, or leave {key} empty")
    names = [metric_name(of_set, metric) for of_set in run.eval_feeds for metric in run.parts.measured]
    for metric in metrics if names else ():
        if metric not in names:
            raise UserError(f"{key} {metric!r} is not evaluated", nearest(metric, names), f"correct {key}")


class EarlyStop(Callback):
    """Runs on all ranks over metrics that are equal on all; the wish to stop still waits for an agreement (law 6)."""

    where = "all"
    setting = "early_stop"
    doing = "reading the best weights"
    steers = True
    state_key = "EarlyStop"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(run.config.early_stop.metric)

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watches = [settings.metric, _sign(settings.metric, settings.mode)]
        self.best: float | None = None
        self.waited = 0

    def fit_start(self, run: Run) -> None:
        """Refuse a run that does not evaluate the metric; a run that is resumed after it was stopped stays stopped."""
        need_evaluation(run, "early_stop.metric", self._settings.metric)
        need_direction(run, self._settings.metric, self._settings.mode, ("early_stop.metric", "early_stop.mode"))
        if self.waited >= self._settings.patience:
            run.want_stop(f"early stop: {self._settings.metric} had not improved for "
                          f"{count(self.waited, 'evaluation')}")

    def eval_end(self, run: Run) -> None:
        s = self._settings
        value = value_of(run, s.metric, "early_stop.metric")
        if not is_due(run.config, run.state.cursor):
            return
        sign = _sign(s.metric, s.mode)
        if math.isfinite(value) and (self.best is None or sign * (value - self.best) > s.min_delta):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= s.patience:
            best = "never finite" if self.best is None else f"not better than {self.best:.6g}"
            run.want_stop(f"early stop: {s.metric} {best} for {count(self.waited, 'evaluation')}")

    def fit_saved(self, run: Run) -> None:
        """Put the best weights into the model, after the last checkpoint and before Keras' ``on_train_end``."""
        if self._settings.restore and not run.state.requeue:
            _restore(run, self._settings.metric)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "of": self._watches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`, of the same metric in the same direction."""
        if state.get("of", self._watches) == self._watches:
            self.best, self.waited = state["best"], int(state["waited"])


def watched(config: Config) -> dict[str, float]:
    """Return each metric whose best checkpoint is kept, with its `_sign`; an explicit mode wins over auto."""
    best, stop = config.checkpoint, config.early_stop
    given = [(best.keep_best, best.keep_best_mode)] + [(stop.metric, stop.mode)] * stop.restore
    found: dict[str, float] = {}
    for metric, mode in given:
        if metric and (metric not in found or mode != "auto"):
            found[metric] = _sign(metric, mode)
    return found


class KeepBest(Callback):
    """Requests a checkpoint of each evaluation that is better than all before; the first of equal ones is the best."""

    where = "all"
    state_key = "KeepBest"
    before = ("Checkpoint",)

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(watched(run.config))

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls(run)

    def __init__(self, run: Run) -> None:
        self._signs = watched(run.config)
        self._best = run.state.findings.best
        self._best |= {metric: [] for metric in self._signs}
        self._saved, self._measured, self._watches = -1, "", False

    def fit_start(self, run: Run) -> None:
        """Refuse a run that does not evaluate the metric; say what a single evaluation means."""
        best = run.config.checkpoint
        need_evaluation(run, "checkpoint.keep_best", *([best.keep_best] if best.keep_best else []))
        need_direction(run, best.keep_best or "loss", best.keep_best_mode,
                        ("checkpoint.keep_best", "checkpoint.keep_best_mode"))
        self._watches = run.control.agree(any(
            not type(one).__module__.startswith("hvdtrain.engine.callbacks.") and getattr(one, "callbacks", True)
            for one in run.callbacks))  # of Keras' bridge, those that it calls
        if best.keep_best and not (run.config.eval_every or run.config.eval_steps):
            run.note("checkpoint.keep_best with eval_every 0: only the last weights are evaluated and kept")

    def eval_end(self, run: Run) -> None:
        step, metrics, improved = run.state.cursor.step, run.state.metrics, False
        for metric, sign in self._signs.items():
            value, best = value_of(run, metric, "checkpoint.keep_best"), self._best[metric]
            if math.isfinite(value) and (not best or sign * (value - best[0].metrics[metric]) > 0):
                found = BestEvaluation(step, dict(metrics), str(run.out))
                best[:] = [found, *(one for one in best if one.step != step)][:CANDIDATES]
                improved = True
        if improved and self._watches:
            self._measured = _digest(run)
        ends = run.state.cursor.epoch >= run.config.epochs or run.stopping()  # at_end saves these weights
        # What was saved before an evaluation does not name it: without at_end the last step is saved again.
        if improved and run.begun and (not run.config.checkpoint.at_end if ends else self._saved != step):
            run.state.save_due = True

    def epoch_end(self, run: Run) -> None:
        """Refuse callbacks that have changed weights since the evaluation; what is saved is to be what was measured."""
        measured, self._measured = self._measured, ""
        if measured and run.control.agree(measured != _digest(run)):
            raise UserError("a callback changed the weights after an evaluation, and they are kept as the best",
                            "weights that callbacks only read there", "change weights at the begin of an epoch or "
                            "after a batch; or leave out checkpoint.keep_best, and set early_stop.restore: false")

    def fit_end(self, run: Run) -> None:
        self.epoch_end(run)

    def checkpoint(self, run: Run) -> None:
        if run.state.cursor.epoch_step:  # an evaluation within the epoch, whose weights are saved now
            self.epoch_end(run)
        self._saved = run.state.cursor.step

    def told(self, run: Run) -> None:
        """Forget an evaluation whose checkpoint could not be written: the best before is the best that is kept.

        Not that of the last step, whose weights are in memory when the fit ends.
        """
        failed = [int(word.text.partition(" ")[0]) for word in run.state.told if word.topic == TOPIC]
        for best in self._best.values():
            best[:] = [one for one in best if one.step not in failed or one.step == run.state.cursor.step]
        self._saved = -1 if self._saved in failed else self._saved

    def state_dict(self) -> dict[str, Any]:
        return {"signs": self._signs, "best": {
            metric: [[one.step, {name: value if math.isfinite(value) else None for name, value in one.metrics.items()},
                      one.out] for one in best] for metric, best in self._best.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`, of metrics whose direction is as before."""
        for metric, sign in self._signs.items():
            rows = state["best"].get(metric, []) if state["signs"].get(metric) == sign else []
            self._best[metric][:] = [BestEvaluation(int(step), {
                name: math.nan if value is None else float(value) for name, value in metrics.items()}, out)
                for step, metrics, out in rows]


def _model_arrays(state: ModelState) -> dict[str, np.ndarray]:
    """Return copies of a model's arrays, without the optimizer's."""
    def place(group: str, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype) if group == "model" else ArrayWindow(0, np.empty(0, dtype))

    return state.state(place)[0]["model"]


def _digest(run: Run) -> str:
    found = hashlib.sha256()
    for array in _model_arrays(run.parts.state).values():
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


class BestWeights:
    """Weights of the best evaluation, which `hold` and `release` exchange with those of training; with ``ema`` the
    averages too. Implements `hvdtrain.engine.average.Final`.

    ``groups``: this rank's arrays of the best checkpoint.
    """

    def __init__(self, run: Run, groups: Groups) -> None:
        self._state, self._average, self._weights = run.parts.state, run.average, groups["model"]
        if self._average is not None:
            own, training = self._average.exchange([]), _model_arrays(self._state)
            self._state.load_weights(self._weights)  # of which the averages of tensors that were frozen then consist
            self._average.load(groups.get(GROUP, {}))
            self._state.load_weights(training)
            self._flats = self._average.exchange(own)

    def hold(self) -> None:
        self._exchange(True)

    def release(self) -> None:
        self._exchange(False)

    def _exchange(self, final: bool) -> None:
        own = _model_arrays(self._state)
        self._state.load_weights(self._weights)
        self._weights = own
        if self._average is not None:
            self._flats = self._average.exchange(self._flats)
        if hasattr(self._state, "finalized"):  # else an export would put the averages of use_ema in their place
            self._state.finalized = final


def _folders(run: Run, best: BestEvaluation) -> list[Path]:
    """Return the folders that may hold the checkpoint of an evaluation, the likeliest first.

    An earlier run's folder may have been moved, and the folder of a run that was resumed from elsewhere may hold
    another run's checkpoint of the same step.
    """
    own, earlier = RunDirectory(run.out).checkpoints, RunDirectory(Path(best.out)).checkpoints
    if run.config.resume in ("", "auto") or own == earlier:
        return list(dict.fromkeys((own, earlier)))
    given = absolute(resume_path(run.config))
    return list(dict.fromkeys((*RunDirectory(given).roots, given.parent, earlier)))


def _restore(run: Run, metric: str) -> None:
    """Put the weights of the best evaluation into the model, and their metrics into the results. Collective."""
    best, step, control = run.state.findings.best[metric], run.state.cursor.step, run.control
    last = f"the final model has the weights of step {step}"
    if not best:
        run.note(f"early_stop.restore: no evaluation with a finite {metric} was kept, so {last}")
        return
    opened: list[OpenCheckpoint | None] = [None]

    def find() -> tuple[int, str]:
        reasons: list[str] = []
        for place, one in enumerate(best if control.rank == 0 else ()):
            if one.step == step:
                return place, "; ".join(reasons)
            paths = [CheckpointStore(folder, 1).path_of(one.step) for folder in _folders(run, one)]
            for path in [path for path in paths if os.path.isdir(path)] or paths[-1:]:
                try:
                    opened[0] = read_snapshot(path)
                    return place, "; ".join(reasons)
                except CheckpointError as reason:
                    reasons.append(str(reason))
        return -1, "; ".join(reasons)

    place, reasons = control.bcast(agreed(control, find, "early_stop.restore"))
    if reasons:
        run.note(f"early_stop.restore: the weights of step {best[0].step}, the best by {metric}, cannot be read: "
                 f"{reasons}")
    if place < 0:
        run.note(f"early_stop.restore: {last}")
    elif best[place].step != step:
        _exchange(run, opened[0])
        found, state = best[place], run.state
        state.metrics = dict(found.metrics)
        state.findings.metrics_at = state.findings.weights_at = found.step
        run.note(f"the final model has the weights of step {found.step}, the best by {metric} "
                 f"({found.metrics[metric]:.6g}); the final metrics are of these weights, the last checkpoint holds "
                 f"those of step {step}")


def _exchange(run: Run, kept: OpenCheckpoint | None) -> None:
    """Exchange the weights of training with those that rank 0 has open (elsewhere None). Collective."""
    control, average = run.control, run.average
    run.written.sync(run)
    holders = held_by(run)
    rows = control.bcast([tuple(one) for group in kept.tensors.values() for one in group.heads()] if kept else [])
    heads = [Head(*row) for row in rows]
    wants = [Want(one.group, one.name, 0, one.n) for one in heads
             if one.group == "model" and (holders is None or holders.mine(one))
             or one.group == GROUP and average is not None and average.holds(one.name)]
    groups = fetch(control, kept, wants, heads)

    def exchange() -> None:
        weights = BestWeights(run, groups)
        weights.hold()
        run.services.final.append(weights)

    agreed(control, exchange, "early_stop.restore")
