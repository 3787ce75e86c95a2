"""Decide when a checkpoint is due: by its cost, every N steps or seconds, at the end."""

from __future__ import annotations

import time

from hvdtrain.checkpoint import savers
from hvdtrain.checkpoint.remote import UPLOAD
from hvdtrain.checkpoint.savers import FIRST_S, view
from hvdtrain.checkpoint.sharded import check_shared
from hvdtrain.config import CheckpointConfig as Settings
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.terminal import say
from hvdtrain.core.timeline import span
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.final_files import DiskRoom, of_disk
from hvdtrain.engine.run import Run
from hvdtrain.engine.session import begin, save
from hvdtrain.planning.simulator import save_interval_s

TOPIC = "save"
"""Of what the ranks tell each other: the step whose checkpoint was not written, a space, and why."""


class Checkpoint(Callback):
    """Saves on all ranks, because each has state of its own in a checkpoint; rank 0 writes."""

    where = "all"
    setting = "checkpoint"
    doing = "saving a checkpoint"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._failed = self._in_a_row = 0
        self._told_again = False
        self._clock = time.monotonic()

    def fit_start(self, run: Run) -> None:
        """Count seconds from here, and say what the run's checkpoints will take of the disk."""
        self._clock = time.monotonic()
        if self._settings.layout == "sharded" and run.control.size > 1:
            check_shared(run.control, run.out)
        held = run.control.gather(run.parts.state.state_bytes()) if run.dp.divides_state else []
        averages = run.control.gather(run.average.given_bytes) if run.average is not None else []
        n_best = len(run.state.findings.best)
        saves = savers.often(self._settings) or n_best
        if run.control.rank == 0 and saves and run.state.cursor.epoch < run.config.epochs:
            own = sum(array.nbytes for array in run.rank_state().values())
            one_bytes = run.parts.state.state_bytes() + run.control.size * own + sum(averages)
            if held:  # of which each counts the whole model and its own slices
                model = run.parts.state.state(view)[0]["model"]
                one_bytes += sum(held[1:]) - (len(held) - 1) * sum(array.nbytes for array in model.values())
            free = savers.free_bytes(run.out)
            if run.config.progress != "off":
                say(savers.line(self._settings, one_bytes, free, n_best))
            if warning := savers.warning(self._settings, one_bytes, free, n_best):
                run.note(warning)

    def step_end(self, run: Run) -> None:
        """Ask for a checkpoint where one is due, and tell what came of the last one."""
        self._hear(run)
        s = self._settings  # all ranks count the same steps; the clock is rank 0's, whose wish waits for an agreement
        if s.every_steps and run.state.cursor.step % s.every_steps == 0:
            run.state.save_due = True
        if run.control.rank == 0 and self._waits_s(run) <= time.monotonic() - self._clock:
            run.want_save()

    def _waits_s(self, run: Run) -> float:
        """Return the seconds between two saves, by rank 0's clock; infinite where it does not decide."""
        s = self._settings
        if s.every_s:
            return s.every_s
        if s.every == "off" or s.every_steps:
            return float("inf")
        if run.saver is None:
            return FIRST_S
        if run.saver.cost_s is None or run.saver.busy():
            return float("inf")
        return save_interval_s(run.saver.cost_s, run.saver.spent.last_took_s, s.mtbf_s)

    def checkpoint(self, run: Run) -> None:
        self._clock = time.monotonic()
        run.state.wishes.save = False  # wished for again between the agreement and this save
        begin(run)

    def told(self, run: Run) -> None:
        """Report a first unwritten checkpoint, count it, or end the run, as configured; older ones are whole."""
        for word in run.state.told:
            if word.topic == TOPIC:
                step, _, error = word.text.partition(" ")
                self._not_written(run, int(step), error)

    def _hear(self, run: Run) -> None:
        """Tell all ranks what this one could not write; say that it is written again."""
        for outcome in run.saver.settled() if run.saver is not None else ():
            if outcome.error:
                run.tell_all(TOPIC, f"{outcome.step} {outcome.error}")
            elif self._in_a_row and run.control.rank == 0:
                self._written_again(run, outcome.step)

    def _not_written(self, run: Run, step: int, error: str) -> None:
        if self._settings.on_failure == "stop":
            raise _problem(f"the checkpoint of step {step}", error, "resume from the previous checkpoint; with "
                           "checkpoint.on_failure: warn the run continues without it")
        if not self._failed:
            run.note(f"step {step}: checkpoint not written ({error}); training "
                     "continues, earlier ones are kept, and further failures are counted")
        self._failed, self._in_a_row = self._failed + 1, self._in_a_row + 1

    def _written_again(self, run: Run, step: int) -> None:
        if not self._told_again:
            run.note(f"step {step}: checkpoints are written again, after {count(self._in_a_row, 'failure')}")
        self._in_a_row, self._told_again = 0, True

    def _needs_last(self, run: Run) -> bool:
        """Return whether a save at the end is asked for; a run that is to continue elsewhere has just been saved."""
        step = run.state.cursor.step
        if run.state.requeue:
            return step > 0 and not run.control.bcast(run.saver is not None and run.saver.spent.written == step)
        return self._settings.at_end and step > 0

    def fit_end(self, run: Run) -> None:
        """Save for the last time; say how many have failed. A failure is an error, raised once the model is written."""
        with span("the last save", "checkpoint"):
            self._finish(run)

    def _finish(self, run: Run) -> None:
        if run.saver is not None:
            run.saver.wait()
        self._hear(run)
        run.hear_last()
        if self._failed:
            last = f", the last {self._in_a_row} in a row" if self._in_a_row else ""
            run.note(f"{count(self._failed, 'checkpoint')} could not be written{last}")
        if run.begun and self._needs_last(run):
            room, error = DiskRoom(run), save(run)
            while error and room.made(error):
                error = save(run)
            if error:
                problem = _problem("the last checkpoint", error, "resume from the previous checkpoint")
                if run.state.requeue:  # no model is written then
                    raise problem
                run.state.findings.unsaved = problem
        elif run.saver is not None:
            run.saver.end()


def _problem(what: str, error: str, do: str) -> UserError:
    """Return the error of a checkpoint that was not written: the disk's, the storage's, or of what was to be stored."""
    if UPLOAD in error:
        return UserError(f"{what} is not stored: {error.rstrip('.')}", "storage that this host can write to",
                         f"check it and {do}").of_kind("disk")
    if of_disk(error):
        return UserError(f"{what} could not be written: {error}", "a writable directory with room",
                         f"free space and {do}").of_kind("disk")
    return UserError(f"{what} could not be written: {error.rstrip('.')}", "", do)
