"""The public `Trainer`: fit, evaluate, save, restore over `hvdtrain.engine.assemble` and `hvdtrain.engine.loop`.

Owns the arguments of `keras.Model.fit` besides model and data: callbacks, class weights, nested inputs.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from hvdtrain import backends
from hvdtrain.checkpoint.downloads import shown
from hvdtrain.checkpoint.run_directory import RunDirectory, complete, kind_of
from hvdtrain.cluster import exit as exits
from hvdtrain.cluster import exit_calls, quiet
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.liveness import causes, pulse
from hvdtrain.config import Config, assumed
from hvdtrain.config.aliases import overridden
from hvdtrain.core.errors import Interrupted, UserError
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.resolve import is_url, paths_from
from hvdtrain.core.terminal import say
from hvdtrain.core.timeline import active
from hvdtrain.data.workers.worker import refuse_inside
from hvdtrain.engine import inference, loop, report_page, session, summary
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.average import averaged, leave_final, training_weights
from hvdtrain.engine.build_model import eval_feed, named_sets, predict_feed
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.history import History
from hvdtrain.engine.final_files import export
from hvdtrain.engine.run import Run
from hvdtrain.reports.progress import silence
from hvdtrain.reports.survivor import failure

P = ParamSpec("P")
R = TypeVar("R")


def _from_home(method: Callable[Concatenate[Trainer, P], R]) -> Callable[Concatenate[Trainer, P], R]:
    """Resolve relative paths from the Trainer's first directory: user code may change it during a run."""
    @wraps(method)
    def call(self: Trainer, *args: P.args, **kwargs: P.kwargs) -> R:
        with paths_from(self._home):
            return method(self, *args, **kwargs)

    return call


@dataclass(frozen=True)
class Result:
    """Result of a fit; the same on every rank.

    Attributes:
        steps: Number of steps in all.
        loss: Loss of the last step that was not skipped.
        metrics: Metrics of the final model, which is in memory and in ``out/model``.
        samples_per_s: Samples per second of all ranks together.
        out: Directory of the run.
        stop: Reason of a stop before the last epoch, or "".
        history: Epoch by epoch "loss", "val_loss" and so on, as in Keras.
        requeue: Whether the job was about to end: the run is saved and not complete. End the script with
            ``sys.exit(75)``.
        metrics_at: Step of the weights that ``metrics`` belong to; -1 if there was no evaluation.
    """

    steps: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    samples_per_s: float = math.nan
    out: Path = Path()
    stop: str = ""
    history: dict[str, list[float]] = field(default_factory=dict)
    requeue: bool = False
    metrics_at: int = -1


class Trainer:
    """Train a single-device PyTorch or Keras model on every rank of the job that runs this script.

    ```python
    from hvdtrain import Config, Trainer

    result = Trainer(Config(epochs=3, global_batch=96)).fit(model, ((x, y), (x_test, y_test)))
    ```

    Run it with ``python``, ``mpirun`` or ``horovodrun``. A `UserError` about configuration, model or data is raised on
    all ranks alike; an exception on one rank alone, if nothing catches it, ends all of them.
    """

    def __init__(self, config: Config | None = None, **overrides: Any) -> None:
        """Replace top-level keys of ``config`` by ``overrides``; `UserError` for a key that it lacks."""
        refuse_inside()
        quiet.watch_import()
        exits.install_hooks(launch_facts(os.environ))  # a mistake in the next lines ends as one in fit would
        config = config or Config()
        if not isinstance(config, Config):
            raise UserError(f"Trainer got a {type(config).__name__}", "a Config", "write Trainer(Config(epochs=3))")
        self.config = overridden(config, overrides).check()
        self.run: Run | None = None
        self._evaluates_only = False
        self._home = ""
        with contextlib.suppress(FileNotFoundError):  # it may have been deleted
            self._home = os.getcwd()

    @exit_calls.told()
    @silence.told
    @_from_home
    def fit(self, model: Any = None, data: Any = None, *, callbacks: Sequence[Any] = (),
            class_weight: dict[int, float] | None = None, collate: Callable[[list[Any]], Any] | None = None,
            eval: Mapping[str, Any] | None = None) -> Result:
        """Train, evaluate, write checkpoints and the final model; collective.

        After a fit that ended for a requeue or by Ctrl-C, another call without arguments resumes it.

        Args:
            model: An nn.Module or keras.Model; None: ``config.model``.
            data: Arrays ``(x, y)``, a pair ``((x, y), (x_test, y_test))``, a torch Dataset, a keras PyDataset, a
                tf.data.Dataset, a datasets.Dataset, or an object with ``__len__`` and ``__getitem__``; None:
                ``config.data``. For a Keras model x and y may be dicts or tuples of arrays.
            callbacks: `Callback` objects, and for a Keras model Keras' own; the same on every rank.
            class_weight: Class number -> factor of the loss of its samples, as in `keras.Model.fit`.
            collate: Puts a list of rows of a torch or Hugging Face dataset together to a batch, such as
                `transformers.DataCollatorWithPadding`; None: ``config.data.collate``.
            eval: Name -> data of further evaluation sets, as ``config.eval``; their metrics are called NAME/METRIC.

        Raises:
            UserError: For a mistake of configuration, model or data, on all ranks.
            Interrupted: After Ctrl-C, when the run is saved on all ranks; a `KeyboardInterrupt`.
        """
        if self._evaluates_only:
            raise UserError("this Trainer was made by evaluate(data) and has no training data",
                            "a Trainer of its own for fit", "make a new Trainer, or call fit before evaluate")
        with backends.gradients_recorded():
            first = self.run is None
            run = self._assembled(model, data, callbacks, class_weight, collate, eval)
            if first and run.control.rank == 0 and not run.state.cursor.step:
                self._tell_assumed(run, model, data)
            if run.state.requeue:
                _continue(run)
            with report_page.stored_at_end(run), report_page.page_at_end(run):
                self._fit(run)
        run.control.barrier("end of fit", self.config.control_timeout_s)
        pulse.at("the script, after fit")
        s = run.state
        if s.requeue:
            causes.leave("interrupted" if s.interrupted else "requeue", s.stop, step=s.cursor.step)
        if s.interrupted:
            saved = f"saved at step {s.cursor.step} in {shown(run.config, run.out)}"
            where = saved if s.cursor.step else "before the first step"
            raise Interrupted(f"interrupted: {where}; --resume auto, or fit() of this Trainer, continues the run")
        history = next((dict(c.history) for c in run.callbacks if isinstance(c, History)), {})
        speed = run.timeline.totals.samples_per_s()
        return Result(s.cursor.step, s.outcome.last_loss, dict(s.metrics), speed, run.out, s.stop, history, s.requeue,
                      s.findings.metrics_at)

    def _tell_assumed(self, run: Run, model: Any, data: Any) -> None:
        """Print what is assumed; the built-in model on the digits is a recipe, which sets all (recipes/digits.yaml)."""
        config = self.config
        recipe = model is None and data is None and (config.model, config.data.name) == ("auto", "digits")
        line = assumed(config, run.setup.idle)
        if line and not recipe and config.progress != "off":
            say(line)

    @staticmethod
    def _fit(run: Run) -> None:
        """Train, then write the final model, the summary and the completion record; collective."""
        try:
            loop.fit(run)
            if run.state.findings.unsaved is not None:
                run.record("failed", **failure(run.state.findings.unsaved, run.control.rank))
        except BaseException as error:
            run.record("failed", **failure(error, run.control.rank))
            raise
        finally:
            with active(run.timeline):
                run.call("close")
            run.records.close(run)
        if run.average is not None and run.average not in run.services.final and not run.state.requeue:
            run.average.hold()
            run.services.final.append(run.average)
        if run.begun and not run.state.requeue:
            _write_model(run)
        if run.control.rank == 0:
            summary.show(run)
        if run.begun and not run.state.requeue:
            _complete(run)

    @exit_calls.told()
    @silence.told
    @_from_home
    def evaluate(self, *, model: Any = None, data: Any = None) -> dict[str, float]:
        """Return exact weighted metrics over the evaluation data, however unevenly sharded; collective."""
        if self.run is None:
            self._evaluates_only = data is not None
            self._assembled(model, data)
        run = self._assembled(model, None)
        if data is None and not run.eval_feeds:
            raise UserError("there is no evaluation data", "a test split", "give data as ((x, y), (x_test, y_test))")
        feed = None if data is None else eval_feed(run, data)
        with loop.joined(run):
            return loop.measure_all(run) if feed is None else loop.measure(run, feed)

    @exit_calls.told()
    @silence.told
    @_from_home
    def predict(self, data: Any = None, *, model: Any = None) -> Any:
        """Return the model's outputs for each sample of ``data``, in its order, on rank 0; None on others; collective.

        A numpy array, or for a model that returns a dict or tuple a dict of arrays by name (``output_0``, ...). Weights
        are those of the last fit, with ``ema`` their average. To write a file in bounded memory, use the command
        ``predict``.

        Args:
            data: As in `fit`; targets may be absent and are not read. None: the evaluation data.
            model: Where this Trainer has not fitted: the model; None: ``config.model``.
        """
        outputs = inference.Collected()
        if self.run is None:
            made = inference.assemble(self.config, model, _columns(model, data), labels=False)
            control, (parts, feed, recovery) = made.job.control, (made.parts, made.feed, made.recovery)
            with contextlib.ExitStack() as stack:
                stack.callback(parts.remove)
                inference.predict(control, parts, feed, recovery, outputs.write)
        else:
            run = self._assembled(model, None)
            if run.parts.layout is not None:
                raise UserError("predict of a model that is partitioned over ranks", "a rank with the whole model",
                                "run python -m hvdtrain predict with the run's directory")
            used = predict_feed(run, _columns(run.spec.model, data))
            if used is None:
                raise UserError("there is no evaluation data", "data to predict", "give predict(data)")
            control = run.control
            with loop.joined(run), averaged(run.average):
                inference.predict(control, run.parts, used, run.recovery, outputs.write)
        return outputs.result() if control.rank == 0 else None

    @exit_calls.told()
    @silence.told
    @_from_home
    def save(self) -> Path:
        """Write a checkpoint of the current state into the run's directory; collective. `UserError` if it fails."""
        run = self._assembled(None, None)
        with loop.joined(run), training_weights(run.services.final):
            error = session.save(run)
        if error:
            raise UserError(f"the checkpoint was not written: {error}", "a writable directory with room",
                            "free space and save again")
        return RunDirectory(run.out).checkpoints

    @exit_calls.told()
    @silence.told
    @_from_home
    def restore(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint, the newest whole one of a run's directory or URL; collective."""
        place = str(path) if is_url(path) else os.path.abspath(os.fspath(path).removeprefix("file://"))
        run = self._assembled(None, None)
        leave_final(run.services.final)
        with loop.joined(run):
            session.restore_from(run, place)

    def _assembled(self, model: Any, data: Any, callbacks: Sequence[Any] = (),
                   class_weight: dict[int, float] | None = None, collate: Callable[[list[Any]], Any] | None = None,
                   eval: Mapping[str, Any] | None = None) -> Run:
        """Return the run, assembled on first use; one Trainer is one run."""
        if self.run is None:
            more = partial(_extras, callbacks=tuple(callbacks), class_weight=class_weight)
            self.run = assemble(_measured(self.config, model), model, _columns(model, data), more=more, collate=collate,
                                eval_sets=named_sets(eval, partial(_columns, model)))
        elif data is not None or model is not None and model is not self.run.spec.model:
            raise UserError("this Trainer has a run already", "one model and one training set for each Trainer",
                            "make a new Trainer for another model or other data")
        elif callbacks or eval or class_weight is not None or collate is not None:
            raise UserError("this Trainer has a run already", "callbacks, class_weight, eval and collate in its first "
                            "fit", "make a new Trainer, and resume from a checkpoint to continue the run")
        return self.run


def _continue(run: Run) -> None:
    state = run.state
    state.requeue, state.interrupted, state.save_due, state.wishes.save = False, False, False, False
    state.stop, state.wishes.stop = "", ""
    causes.withdraw()
    run.call("continued")
    for callback in run.callbacks:
        if hasattr(callback, "arrays") and hasattr(callback, "load_arrays"):  # Keras' on_train_begin sets them back
            callback.load_arrays(callback.arrays())
            callback.load_state_dict(callback.state_dict())
    run.note(f"fit continues at step {state.cursor.step}, after the requeue")


def _is_keras(thing: Any, base: str) -> bool:
    """Return whether ``thing`` is of Keras' class ``base``, without importing Keras."""
    return any(c.__name__ == base and c.__module__.startswith("keras.") for c in type(thing).__mro__)


def _measured(config: Config, model: Any) -> Config:
    """Return ``config`` without the default metric if `model.compile` decides the metrics."""
    if config.metrics != Config().metrics or not _is_keras(model, "Model"):
        return config
    from hvdtrain.backends.keras.compiled import is_compiled

    return replace(config, metrics=[]) if is_compiled(model) else config


def _columns(model: Any, data: Any) -> Any:
    """Return ``data`` with the nested x and y of a Keras model flattened."""
    if data is None or not _is_keras(model, "Model"):
        return data
    from hvdtrain.data.layout import named

    return named(data)


def _extras(run: Run, callbacks: Sequence[Any], class_weight: dict[int, float] | None) -> list[Any]:
    """Return the user's callbacks as hvdtrain's; give a Keras model its class weights."""
    model = run.spec.model
    if _is_keras(model, "Model"):
        _tell_keras(run, class_weight)
    elif class_weight is not None:
        raise UserError(f"class_weight for a {type(model).__name__}", "a keras.Model",
                        "set loss.args.weight: [...], or give sample weights as the data's third array")
    own = [c for c in callbacks if isinstance(c, Callback)]
    keras_own = [c for c in callbacks if _is_keras(c, "Callback")]
    other = next((c for c in callbacks if c not in own and c not in keras_own), None)
    if other is not None:
        raise UserError(f"callbacks hold a {type(other).__name__}", "callbacks of hvdtrain or of Keras",
                        "make it a subclass of hvdtrain.Callback")
    if keras_own and run.parts.layout is not None:
        raise UserError(f"the Keras callback {type(keras_own[0]).__name__} with a pipeline over ranks, "
                        "where no rank has the whole model", "callbacks of "
                                                             "hvdtrain", "leave it out, or leave pipeline out")
    if not keras_own and not _by_compile(run):
        return [*own, History()]
    from hvdtrain.engine.keras_bridge import Bridge

    return [*own, Bridge(keras_own, run)]


def _by_compile(run: Run) -> bool:
    """Return whether `model.compile` rules the loss, so that its metrics belong to the history."""
    if run.spec.task is not None or run.config.loss.name != "auto" or not _is_keras(run.spec.model, "Model"):
        return False
    from hvdtrain.backends.keras.compiled import is_compiled

    return is_compiled(run.spec.model)


def _tell_keras(run: Run, class_weight: dict[int, float] | None) -> None:
    from hvdtrain.backends.keras import compiled

    setup = compiled.setup_of(run.spec.model)
    if class_weight is not None:
        if run.spec.task is not None:
            raise UserError("class_weight together with the model file's "
                            "task", "one of the two", "weight samples in the task")
        setup.class_weight = compiled.check_class_weight(class_weight)
    if run.spec.task is None and run.config.loss.name == "auto" and run.feed.weight_fn is None:
        run.feed.weight_fn = compiled.batch_weight(run.spec.model)


def _write_model(run: Run) -> None:
    """Write the final model, also where the last checkpoint failed; then raise that failure. Collective."""
    unsaved = run.state.findings.unsaved
    try:
        export(run)
    except UserError as error:
        if unsaved is None:
            raise
        raise UserError(f"{unsaved.got}; {error.got}", error.expected, error.do).of_kind(unsaved.kind) from error
    if unsaved is not None:
        raise UserError(f"{unsaved.got}; the final model is in {run.out / 'model'}", unsaved.expected,
                        unsaved.do).of_kind(unsaved.kind)


def _complete(run: Run) -> None:
    """Write the completion record on rank 0; `UserError` on every rank if that fails. Collective."""
    def write() -> None:
        try:
            if run.control.rank == 0:
                complete(run, summary.record(run))
        except OSError as error:
            raise UserError(f"the model is saved, but not the record that the run is complete: {error}",
                            "a writable directory with room",
                            "free space and add --resume auto").of_kind(kind_of(error)) from None

    agreed(run.control, write, "the completion record")
