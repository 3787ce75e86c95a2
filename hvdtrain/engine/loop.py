"""The training loop; `hvdtrain.core.events` has it in pseudo-code. Frameworks stay in a run's parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.checkpoint.run_directory import release, starting
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.events import Event
from hvdtrain.core.protocols import Control, Evaluator, StepGradients
from hvdtrain.core.protocols.types import StepBatch
from hvdtrain.core.timeline import active, span
from hvdtrain.data.feed import Feed
from hvdtrain.data.weighting import check_weight
from hvdtrain.engine import final_files
from hvdtrain.engine.average import averaged, leave_final
from hvdtrain.engine.callbacks.eval_steps import evaluates_epoch, evaluates_step, left_to_epoch, metric_name
from hvdtrain.engine.callbacks.out_of_memory import recovers, repeats, tell
from hvdtrain.engine.model_changes import check_late, follow, may_change
from hvdtrain.engine.run import Run
from hvdtrain.engine.weight_checks import blame
from hvdtrain.parallel.recovery import RecoveringEvaluator


def fit(run: Run) -> None:
    """Train ``run`` from its cursor to its last epoch or to an agreed stop; the model is its user's own again then."""
    leave_final(run.services.final)
    run.state.findings.unsaved, run.state.findings.weights_at = None, -1
    with active(run.timeline), joined(run):
        try:
            with span("start", "start"):
                run.timeline.begin()
                run.records.open()
                _start(run)
            _fit(run)
        finally:
            if run.saver is not None:
                with span("the last save", "checkpoint"):
                    run.saver.close()
            release(run)


@contextlib.contextmanager
def joined(run: Run) -> Iterator[None]:
    """Within it the model belongs to the run: whoever calls it afterwards, on one rank alone, waits for none."""
    run.join()
    try:
        yield
    finally:
        run.leave()


def _start(run: Run) -> None:
    run.services.changes.watched, run.services.changes.starts = may_change(run), True
    with starting(run):  # what may still refuse the run comes in here, and changes nothing on disk
        run.emit(Event.FIT_START)
        run.settle()  # a resumed run may have been at its end
        final_files.check(run)
        _stop_at_max_steps(run)


def _fit(run: Run) -> None:
    config, state = run.config, run.state
    while state.cursor.epoch < config.epochs and not run.stopping():
        run.emit(Event.EPOCH_START)
        _epoch(run)
        if run.stopping() and (state.requeue or run.feed.steps_left(state.cursor) != 0):
            break
        run.parts.optimizer.end_epoch()
        state.cursor = state.cursor.next_epoch()
        if evaluates_epoch(config, state.cursor.epoch) and state.findings.metrics_at != state.cursor.step:
            evaluate(run)
        run.emit(Event.EPOCH_END)
        run.settle()
        _checkpoint_due(run)
    # Of the last step, or since the copies met last, there is no agreement to tell it.
    if run.control.agree(run.parts.optimizer.skipped() or state.outcome.poisoned):
        state.outcome.bad_ranks, state.outcome.bad_where = list(range(run.control.size)), {}
        run.emit(Event.NON_FINITE)
    if state.findings.metrics_at != state.cursor.step and not state.requeue:
        evaluate(run)
    _checkpoint_due(run)  # requested outside of a step
    run.emit(Event.FIT_END)
    run.emit(Event.FIT_SAVED)


def _epoch(run: Run) -> None:
    phases = run.phases
    if run.state.findings.eval_owed:
        _evaluate_in_epoch(run)
    if cost := run.feed.walk.replay(run.state.cursor):
        run.note(cost)
    with contextlib.closing(run.feed.epoch(run.state.cursor)) as batches:
        while not run.stopping():
            with phases.data:
                batch = next(batches, None)
            if batch is None:
                return
            train_step(run, batch)


def train_step(run: Run, batch: StepBatch) -> None:
    """Train on one global batch: compute, exchange, agree, update; again where a rank ran out of memory over it."""
    state = run.state
    state.batch, run.services.timeline.step = batch, state.cursor.step
    run.emit(Event.STEP_START)
    follow(run)
    if batch.n_global and batch.weight:
        while not _computed_and_updated(run, batch):
            run.emit_told()
    else:
        _without_update(run)
    state.cursor = batch.cursor_after
    _stop_at_max_steps(run)
    run.emit_told()
    run.emit(Event.STEP_END)
    if evaluates_step(run.config, state.cursor.step) and not left_to_epoch(run):
        _evaluate_in_epoch(run)
    _checkpoint_due(run)


def _computed_and_updated(run: Run, batch: StepBatch) -> bool:
    """Return whether the step is over; False where all is as before it, to be repeated."""
    setup, phases, step = run.setup, run.services.phases, run.state.cursor.step
    run.state.batch = batch = run.services.recovery.cut(batch)
    dp = setup.dp
    with phases.gradients:
        dp.begin(step)
        done = setup.schedule.gradients(batch, dp.scale(batch), dp)
    meets = dp.meets(step)
    with phases.vote:
        bad = _judge(run, batch, done, meets)
    if bad and (repeats(run) if meets else done.lost is not None):
        _undo(run)
        return False
    if not bad:
        with phases.update:
            bad = _update(run, done, meets)
    phases.finish(batch, done.waited_s, setup.parts.stage.device_s())
    _conclude(run, batch, bad, meets)
    return True


def _judge(run: Run, batch: StepBatch, done: StepGradients, meets: bool) -> list[int]:
    """Return the ranks whose loss or gradient forbids an update; collective where the replicas synchronize."""
    if done.lost is not None:
        tell(run, done.lost, meets)
    written = run.services.written
    written.look(run)
    bad = _vote(run, batch, done) if meets else _by_myself(run, done)
    written.hear(run)
    return bad


def _update(run: Run, done: StepGradients, meets: bool) -> list[int]:
    """Clip and update; return all ranks where the update itself found gradients that are not finite, else []."""
    state, setup, services = run.state, run.setup, run.services
    with services.recovery.once("the update"):
        unused = services.unused.agreed if meets else setup.parts.stage.unused
        services.unused.check(unused)
        services.written.combine(run, meets)  # the update starts from what forward passes have written to parameters
        finite, norm = setup.dp.update(state.cursor.step, done.grads, unused)
        services.unused.updated(unused)
    state.grad_norm = state.grad_norm if math.isnan(norm) else norm
    return [] if finite else list(range(run.control.size))


def _conclude(run: Run, batch: StepBatch, bad: list[int], meets: bool) -> None:
    """Keep what the step has come to; ``bad``: the ranks for which it made no update."""
    state, outcome, parts = run.state, run.state.outcome, run.setup.parts
    outcome.updated = outcome.pending_updated = not bad
    # The same on every rank where they have voted. What overflows on one stage shows in the loss of its copy.
    mesh = run.setup.mesh
    overflowed = parts.scale.update([rank for r in bad for rank in mesh.copies[mesh.copy_of(r)]])
    if bad:
        parts.buffers.discard()
        run.dp.discard()
        _skipped(run)
    outcome.last_loss = outcome.last_loss if math.isnan(state.loss) else state.loss
    outcome.poisoned = outcome.poisoned and not meets
    if bad and not overflowed:
        if meets:
            _tell_not_finite(run, batch, bad)
        outcome.poisoned = not meets  # told at the next agreement (law 6)
    outcome.met = meets and (not bad or outcome.met)


def _without_update(run: Run) -> None:
    """Agree on a step that trains nothing: no sample could be read, or no label counts (W = 0)."""
    state = run.state
    state.loss = math.nan
    _skipped(run)
    run.settle()
    state.save_due = run.control.agree(state.wishes.save) or state.save_due
    state.wishes.save = False


def _skipped(run: Run) -> None:
    """Mark the step at hand as one without an update: it has no loss and no gradient norm."""
    run.updated, run.state.grad_norm = False, math.nan
    if not run.parts.stage.asynchronous:  # there the loss is that of the step before
        run.state.loss = math.nan


def _undo(run: Run) -> None:
    """Bring back what the step at hand has changed on this rank: buffers, compressor state, random generators.

    What was heard of the step before, on an asynchronous device, is to be heard again. The loss scale stays as it is.
    """
    run.parts.buffers.discard()
    run.dp.discard()
    run.parts.stage.rewind()
    for take_back in run.recovery.taken_back:
        take_back()
    run.state.outcome.unread_loss()
    run.phases.lose()


def _checkpoint_due(run: Run) -> None:
    if run.state.save_due:
        run.state.save_due = False
        with run.phases.checkpoint:
            run.emit(Event.CHECKPOINT)
    run.batch = None


def _tell_not_finite(run: Run, batch: StepBatch, bad: list[int]) -> None:
    """Find who brought in what is not finite, of an asynchronous device's past step, and tell callbacks."""
    state = run.state
    state.outcome.bad_ranks, state.outcome.bad_where = bad, {}
    if not run.parts.stage.asynchronous:
        origin = run.schedule.origin
        again = None if origin is None else partial(origin, batch, run.dp.scale(batch), run.dp)
        state.outcome.bad_where = blame(run.parts, batch, bad, run.control, run.recovery, again)
        state.outcome.bad_ranks = sorted(state.outcome.bad_where) or bad
    run.emit(Event.NON_FINITE)


def _stop_at_max_steps(run: Run) -> None:
    # Every rank counts alike, so this needs no agreement.
    if 0 < run.config.max_steps <= run.state.cursor.step:
        run.state.stop = f"max_steps {run.config.max_steps}"


def _vote(run: Run, batch: StepBatch, done: StepGradients) -> list[int]:
    """Agree on loss, gradient, stop and save in one sum; return the ranks that are not finite, maybe all."""
    state, setup, services = run.state, run.setup, run.services
    parts, outcome, wants = setup.parts, state.outcome, state.wishes
    asynchronous = parts.stage.asynchronous
    loss_sum, weight = outcome.local_loss(done.totals, asynchronous)
    # A loss that is read one step late must not condemn the step at hand: there the check of its gradient decides.
    late = asynchronous and (setup.config.nan_guard == "skip" or parts.scale.on)
    outcome.poisoned = parts.optimizer.skipped() or outcome.poisoned  # still so where the step is repeated
    lost = done.lost is not None
    bad = (not math.isfinite(loss_sum) and not late) or outcome.poisoned or lost
    squares = math.nan if lost else setup.dp.squares(done.grads)
    wishes = [bool(wants.stop), wants.save, bool(wants.words)]
    changed = not lost and services.unused.changed(parts.stage.unused)
    unfrozen = "" if parts.facts is None else parts.facts.late()
    mine = [0.0 if bad else loss_sum, weight, bad, *wishes, changed, bool(unfrozen), squares]
    sums = services.control.sum(np.array(mine, dtype=np.float64))
    loss, total, n_bad, n_stop, n_save, n_words, n_changed, n_late, squares = sums.tolist()
    pulse.heard(state.cursor.step)
    if not asynchronous and not n_bad:
        check_weight(total, batch.weight)
    # A late loss may be of a step that was skipped.
    counts = not n_bad and (outcome.pending_read or not asynchronous)
    state.loss = loss / total if total and counts else math.nan
    if n_save:
        state.save_due = True
    wants.save = False
    if n_stop:
        state.stop = next(reason for reason in run.control.gather(wants.stop) if reason)
    if n_words:
        run.hear()
    if n_changed:
        run.unused.gather()
    if n_late:
        check_late(run, unfrozen)
    if n_bad:
        return [r for r, b in enumerate(run.control.gather(bad)) if b]
    if not math.isfinite(squares):
        return list(range(run.control.size))
    state.grad_norm = math.nan if asynchronous else math.sqrt(squares)
    return []


def _by_myself(run: Run, done: StepGradients) -> list[int]:
    """Judge a step without an exchange by this rank's own loss; return this rank if it is not finite."""
    loss_sum, weight = run.state.outcome.local_loss(done.totals, run.parts.stage.asynchronous)
    run.state.loss = loss_sum / weight if weight else math.nan
    finite = done.lost is None and math.isfinite(loss_sum) and math.isfinite(run.dp.squares(done.grads))
    return [] if finite else [run.control.rank]


def _evaluate_in_epoch(run: Run) -> None:
    """Evaluate between two steps, and decide on wishes to stop; a run that saves for a requeue does so when resumed.

    Before the step's checkpoint, so that a run that resumes from it neither repeats nor misses the evaluation.
    """
    run.state.findings.eval_owed = run.state.requeue
    if not run.state.requeue:
        with run.feed.reading:
            evaluate(run)
        run.settle()


def evaluate(run: Run) -> None:
    """Measure the evaluation data, if there is any, and tell the callbacks. Collective."""
    if run.eval_feeds:
        run.state.metrics, run.state.findings.metrics_at = measure_all(run), run.state.cursor.step
        run.emit(Event.EVAL_END)


def measure_all(run: Run) -> dict[str, float]:
    """Return exact metrics over all evaluation sets, those of a named one as NAME/METRIC. Collective."""
    found: dict[str, float] = {}
    for name, feed in run.eval_feeds.items():
        found |= {metric_name(name, metric): value for metric, value in measure(run, feed, name).items()}
    return found


def measure(run: Run, feed: Feed, name: str = "") -> dict[str, float]:
    """Return exact metrics over ``feed`` of set ``name``: totals, summed in rank order. Collective."""
    with run.phases.evaluation, averaged(run.average):
        found = _measured(run, feed)
        feed.compare(run.state.cursor.epoch)
    doubt = f"ledger: the evaluation{name and f' of {name}'} is not verified: {feed.unlike}"
    if feed.unlike and doubt not in run.notes:
        run.note(doubt)
    for text in feed.left_out(f"of the evaluation data {name and f'{name} '}"):
        run.note(text)
    return found


def _measured(run: Run, feed: Feed) -> dict[str, float]:
    evaluator = run.parts.evaluator
    run.written.sync(run)
    run.written.evaluating(run)
    again, samples = True, 0
    while again:
        adding = RecoveringEvaluator(evaluator, run.recovery, run.state.cursor.step)
        with contextlib.closing(feed.eval_epoch()) as batches:
            try:
                for batch in batches:
                    adding.add(batch)
                    samples += batch.n_local
            except BaseException:
                if run.parts.layout is None:
                    evaluator.totals()  # of a part of the data: none of the next evaluation's
                raise
        rows = run.control.gather((adding.totals(), adding.ended(), run.written.fresh(run)))
        again = recovers(run, [shortages for _, shortages, _ in rows])
    run.written.evaluated(run, samples, [fresh for _, _, fresh in rows])
    return results(run.control, evaluator, [totals for totals, _, _ in rows])


def results(control: Control, evaluator: Evaluator, totals_P: list[dict[str, Any]]) -> dict[str, float]:
    """Return metrics from the totals of all ranks, or of the first rank with states, which is collective."""
    totals = summed(totals_P)
    if all(isinstance(total, np.ndarray) for total in totals.values()):
        return evaluator.results(totals)
    found: dict[str, float] = {}
    # By a rank's own device the last digits of a result may differ, and what a model file names is not on all ranks.
    for row in control.gather(agreed(control, lambda: evaluator.results(totals), "evaluation")):
        found |= {name: value for name, value in row.items() if name not in found}
    return found


def summed(totals_P: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the totals of an evaluation over all ranks: sums in rank order; states as the list of all ranks'."""
    # By name, not by place: a rank without samples does not know what the others measured.
    names = list(dict.fromkeys(name for totals in totals_P for name in totals))
    found = {name: [t[name] for t in totals_P if name in t] for name in names}
    return {name: np.asarray(sum(each)) if isinstance(each[0], np.ndarray) else each for name, each in found.items()}
