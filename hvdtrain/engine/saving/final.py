"""The final files of a run, and where they go on a full disk; the weights of a partitioned model as one file.

Owns who sends what of a partitioned model: each array comes from the lowest rank that has it, in pieces, and rank 0
writes each as it comes. What a whole model is written as is the backends'.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import weights
from hvdtrain.checkpoint.adapters import PartitionedModel
from hvdtrain.checkpoint.run_directory import RunDirectory, kind_of
from hvdtrain.checkpoint.savers import view
from hvdtrain.checkpoint.stream import StreamedContent, head, in_order
from hvdtrain.checkpoint.tensors import Spec, layout
from hvdtrain.checkpoint.transfer import arriving
from hvdtrain.checkpoint.weights import check_finite, check_shards
from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Head, Shard
from hvdtrain.engine.average import averaged
from hvdtrain.engine.guards.finite import trained
from hvdtrain.engine.run import Run
from hvdtrain.engine.saving.contents import held_by
from hvdtrain.engine.saving.room import Room, is_full

NATIVE = {"torch": "model.pt", "tensorflow": "model.keras"}
"""What a whole model is written as besides, by framework."""


def export(run: Run) -> list[str]:
    """Write the final model under ``out/model`` on rank 0; return the file names there, on every rank. Collective.

    On a full disk older checkpoints go for it, then the run waits, then the model is written under TMPDIR.
    """
    run.written.sync(run)
    room, directory = Room(run), run.out / RunDirectory.MODEL
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
            check_finite(run.parts.state.state(view)[0]["model"], trained(run.parts))
        with _room_for_the_model(run, directory):
            directory.mkdir(parents=True, exist_ok=True)  # also where the run's directory was deleted meanwhile
            return [] if parted else run.parts.state.export(directory)

    names = run.control.bcast(agreed(run.control, written, "export"))
    return write(run, directory, lambda: _room_for_the_model(run, directory)) if parted else names


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
        kept = f"the checkpoint of step {at} holds the weights" if saved else "no checkpoint holds the last weights"
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
    """Return in words what a whole model would be written as besides, and how to have it; "" for nothing."""
    native = NATIVE.get(framework, "")
    return native and (f"{native} is left out: no rank holds all of the model. Load model.safetensors into the whole "
                       "model, on a machine that has the memory for it, and save that")


def _weights(run: Run) -> list[Shard]:
    """This rank's part of the model, as views."""
    holders = held_by(run)
    assert holders is not None
    held = PartitionedModel(run.control.rank, holders, run.parts.state, among=False)
    shards = in_order(one for one in held.shards(view) if one.group == "model")
    check_shards(shards, trained(run.parts))
    return shards
