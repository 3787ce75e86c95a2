"""The final files of a run, tried before the first step; where they go on a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import files, weights
from hvdtrain.checkpoint.adapters import PartitionedModel
from hvdtrain.checkpoint.run_directory import RunDirectory, kind_of
from hvdtrain.checkpoint.savers import view
from hvdtrain.checkpoint.store import CheckpointStore
from hvdtrain.checkpoint.stream import StreamedContent, head, in_order
from hvdtrain.checkpoint.tensors import Spec, layout
from hvdtrain.checkpoint.transfer import arriving
from hvdtrain.checkpoint.weights import check_finite, check_shards
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Head, Shard
from hvdtrain.core.terminal import say
from hvdtrain.engine import summary
from hvdtrain.engine.average import averaged
from hvdtrain.engine.run import Run
from hvdtrain.engine.saving import callback_states, held_by
from hvdtrain.engine.weight_checks import trainable_names

STEP = "weights.json"
"""Step and metrics of the final weights, next to them."""

NATIVE = {"torch": "model.pt", "tensorflow": "model.keras"}
"""What a whole model is written as besides, by framework."""


def export(run: Run) -> list[str]:
    """Write the final model under ``out/model`` on rank 0; return the file names there, on every rank. Collective.

    On a full disk older checkpoints go for it, then the run waits, then the model is written under TMPDIR.
    """
    run.written.sync(run)
    room, directory = DiskRoom(run), run.out / RunDirectory.MODEL
    with averaged(run.average):
        while True:
            try:
                return _export(run, directory)
            except UserError as error:
                if room.made(str(error)):
                    continue
                if is_full(str(error)):
                    _elsewhere(run, error)
                raise


def _export(run: Run, directory: Path) -> list[str]:
    parted = run.parts.layout is not None

    def written() -> list[str]:
        if run.control.rank != 0:
            return []
        if not parted:
            check_finite(run.parts.state.state(view)[0]["model"], trainable_names(run.parts))
        with _room_for_the_model(run, directory):
            directory.mkdir(parents=True, exist_ok=True)  # also where the run's directory was deleted meanwhile
            return [] if parted else run.parts.state.export(directory)

    names = run.control.bcast(agreed(run.control, written, "export"))
    names = write(run, directory, lambda: _room_for_the_model(run, directory)) if parted else names
    agreed(run.control, lambda: _write_step(run, directory) if run.control.rank == 0 else None, "export")
    return names


def _write_step(run: Run, directory: Path) -> None:
    """Write of which step the weights in ``directory`` are, after them; rank 0's part."""
    found = summary.record(run)
    facts = {"step": found["weights_at"], "trained_steps": found["steps"], "metrics": found["metrics"],
             "metrics_at": found["metrics_at"]}
    with _room_for_the_model(run, directory), files.replacing(directory / STEP) as place:
        place.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _elsewhere(run: Run, error: UserError) -> None:
    """Write the model under TMPDIR and raise `UserError` that tells where; return where that fails. Collective."""
    target = Path()
    if run.control.rank == 0:
        with contextlib.suppress(OSError):
            target = Path(tempfile.mkdtemp(prefix=f"{run.out.name}-model-"))
    target = run.control.bcast(target)
    if target == Path():
        return
    try:
        names = _export(run, target)
    except UserError:
        if run.control.rank == 0:
            shutil.rmtree(target, ignore_errors=True)
        return
    raise UserError(f"{error.got}; it was written to {target} ({', '.join(names)})", error.expected,
                    f"copy it from {target}, which may be cleared, and free space").of_kind("disk")


@contextlib.contextmanager
def _room_for_the_model(run: Run, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        at = run.state.cursor.step
        saved = run.saver is not None and run.saver.spent.written == at
        kept = f"the checkpoint of step {at} holds the weights" if saved else "no checkpoint has the last weights"
        raise UserError(f"the final model could not be written to {directory}: {error}", "a writable directory with "
                        "room", f"free space; {kept}").of_kind(kind_of(error)) from None


def write(run: Run, directory: Path, guarded: Callable[[], AbstractContextManager[None]]) -> list[str]:
    """Write the weights into ``directory``, which rank 0 sees, and say what is left out; return the files' names.

    Collective. ``guarded``: makes an error of the disk a `UserError`, which is raised on every rank, as is that of
    weights which are not finite.
    """
    with run.parts.state.final():
        _write(run, directory, guarded)
    run.notes += filter(None, [left_out(run.spec.framework)])
    return [weights.FILE]


def _write(run: Run, directory: Path, guarded: Callable[[], AbstractContextManager[None]]) -> None:
    control, framework = run.control, run.spec.framework
    own = agreed(control, lambda: _weights(run), "export")
    every = [Head(*row) for rows in control.gather([tuple(head(one)) for one in own]) for row in rows]
    places, codes = weights.named({one.name: Spec(np.dtype(one.dtype), one.shape) for one in every}, framework)
    names = {place: name for name, place in places.items()}
    own = in_order(replace(one, name=names[one.name]) for one in own)
    heads_P = [[Head(*row) for row in rows] for rows in control.gather([tuple(head(one)) for one in own])]
    content = StreamedContent(heads_P, arriving(control, heads_P, own), {})

    def put() -> None:
        try:
            if control.rank == 0:
                plan = layout(content.specs()["model"], "model", codes)
                with guarded():
                    weights.put(plan, content.blocks("model", plan.names), directory / weights.FILE)
        finally:
            content.drain()  # a rank that has begun to send sends all

    agreed(control, put, "export")


def left_out(framework: str) -> str:
    """Return as text what a whole model would be written as besides, and how to have it; "" for nothing."""
    native = NATIVE.get(framework, "")
    return native and (f"{native} is not written: no rank holds the whole model. Load model.safetensors "
                       "into the unpartitioned model on a host with enough memory, and save that")


def _weights(run: Run) -> list[Shard]:
    holders = held_by(run)
    assert holders is not None
    held = PartitionedModel(run.control.rank, holders, run.parts.state, among=False)
    shards = in_order(one for one in held.shards(view) if one.group == "model")
    check_shards(shards, trainable_names(run.parts))
    return shards


WAITS_S = (2.0, 8.0, 20.0, 30.0)
"""How long a run waits between attempts for somebody to free space; about a minute in all."""

TEXTS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "not enough space for a checkpoint")


def is_full(error: str) -> bool:
    """Return whether a message says that a disk or a quota has no room left."""
    return any(text in error for text in TEXTS)


def of_disk(error: str) -> bool:
    """Return whether a message is of the file system, not of what was to be written."""
    return "[Errno " in error or is_full(error)


class DiskRoom:
    """Make room before each further attempt: rank 0 removes a checkpoint, or waits."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waits_s = [min(wait_s, run.config.control_timeout_s / 4) for wait_s in WAITS_S]

    def made(self, error: str) -> bool:
        """Return whether another attempt is worth it after ``error``, the same on every rank; collective."""
        return is_full(error) and bool(self._run.control.bcast(self._make() if self._run.control.rank == 0 else False))

    def _make(self) -> bool:
        try:
            # Not by checkpoints of later steps, which a run that continues from an earlier one does not have.
            reached = self._run.state.cursor.step + 1
            dropped = CheckpointStore(RunDirectory(self._run.out).checkpoints, 1).drop_oldest(reached)
        except OSError:  # what cannot be removed gives no room
            dropped = None
        if dropped is not None:
            self._note(f"the disk of {self._run.out} is full: the oldest checkpoint, {dropped.name}, was removed")
            return True
        if not self._waits_s:
            return False
        wait_s = self._waits_s.pop(0)
        say(f"note: the disk of {self._run.out} is full: trying again in {wait_s:.0f} s")
        pulse.at("waiting for room on the disk")
        time.sleep(wait_s)
        return True

    def _note(self, text: str) -> None:
        self._run.notes.append(text)
        say(f"note: {text}")


def check(run: Run) -> None:
    """Raise `UserError` on all ranks for what rank 0 could not write at the end; note omissions. Collective."""
    control = run.control
    run.call("saving")
    remark = control.bcast(agreed(control, lambda: _tried(run) if control.rank == 0 else "", "testing the final files"))
    if remark:
        run.note(remark)


def _tried(run: Run) -> str:
    """Try all; return what will be left out, or ""; rank 0's part."""
    for name in (RunDirectory.CHECKPOINTS, RunDirectory.MODEL):
        _check_folder(run.out / name)
    callback_states(run)
    try:
        json.dumps(summary.record(run), default=str)
    except Exception as error:  # parts of the user's, such as transforms, tell of themselves in it
        raise UserError(f"the record of the finished run, completed.json, cannot be made: {type(error).__name__}: "
                        f"{error}", "describe() of custom transforms and extensions to return texts",
                        "fix the extension that the message names") from error
    return "" if run.parts.layout is not None else run.parts.state.try_export()


def _check_folder(path: Path) -> None:
    if os.path.lexists(path) and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
        raise UserError(f"{path} is {'not writable' if path.is_dir() else 'not a folder'}",
                        "a folder that this run may write into", "move it away, or choose another --out")
