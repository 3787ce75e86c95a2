"""Save a run as a checkpoint and load one into it, on all ranks at once; `saving` copies and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint import CheckpointError, CheckpointStore, OpenCheckpoint, read_snapshot, remote
from hvdtrain.checkpoint.adapters import WRAPPERS, fitting, model_names, state_key_of
from hvdtrain.checkpoint.downloads import resume_path
from hvdtrain.checkpoint.manifest import decode_state
from hvdtrain.checkpoint.run_directory import RunDirectory, ensure_out, find_out
from hvdtrain.checkpoint.snapshot import inspect
from hvdtrain.checkpoint.transfer import fetch
from hvdtrain.cluster.control import agreed
from hvdtrain.config import Config, ScheduleConfig, cut_over_ranks, run_length, schema
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Before
from hvdtrain.core.protocols import Control, RunCallback
from hvdtrain.core.protocols.run import Head, Want
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.core.records import flat
from hvdtrain.core.resolve import absolute
from hvdtrain.engine import model_changes
from hvdtrain.engine.average import GROUP
from hvdtrain.engine.run import Run
from hvdtrain.engine.saving import Saving, held_by, json_able, parts_of, schedule_of
from hvdtrain.parallel.pipeline.plan import ranks_of

MOST_NAMES = 8
"""Damaged checkpoints that are named."""


def save(run: Run) -> str:
    """Write the run's state as a checkpoint; return "" or why it could not be written, on every rank. Collective."""
    begin(run)
    error = finish(run)
    assert run.saver is not None
    run.saver.end()
    return error


def begin(run: Run) -> None:
    """Copy the run's state and have it written while the run continues; collective.

    What comes of it is told by `finish` or, on the rank that has met an error, by ``run.saver.settled()``.
    """
    ensure_out(run)
    run.directory.made = []  # it is to stay, also where a fit is refused later
    if run.saver is None:
        run.saver = Saving(run)
    run.saver.begin()


def finish(run: Run) -> str:
    """Wait for the latest save; return "" or why it was not written, on every rank. Collective."""
    if run.saver is None:
        return ""
    run.saver.wait()
    return run.control.bcast(run.saver.latest())


def find(resume: str, out: Path | None, log: Callable[[str], None]) -> OpenCheckpoint | None:
    """Verify and open the checkpoint that ``resume`` ("auto" or a path) means; None where auto finds none. Rank 0 only.

    A path may be one checkpoint, a run's directory or its checkpoints directory. Damaged checkpoints are told to
    ``log`` and the newest whole one is used. Errors: `UserError` where all are damaged, and for a path without any.
    """
    if resume == "auto":
        if out is None or not RunDirectory(out).checkpoints.is_dir():
            return None
        return _newest_whole(RunDirectory(out).checkpoints, log)
    path = absolute(resume)
    if not path.exists():
        raise UserError(f"there is no checkpoint {resume}", "the directory of a checkpoint or of a run",
                        "correct resume")
    for root in RunDirectory(path).roots:
        if root.is_dir() and any(root.glob("step-*")):
            return _newest_whole(root, log)
    return read_snapshot(path)


def _newest_whole(root: Path, log: Callable[[str], None]) -> OpenCheckpoint | None:
    """Open the newest whole checkpoint under ``root``; None where there is none, `UserError` where all are damaged."""
    store = CheckpointStore(root, 1)
    found = store.latest_whole(log)
    if found is not None:
        return found[1]
    names = store.names()
    if not names:
        return None
    older = f" and {len(names) - MOST_NAMES} older" if len(names) > MOST_NAMES else ""
    shown = ", ".join(names[-MOST_NAMES:]) + older
    raise UserError(f"all checkpoints in {root} are damaged: {shown}; the notes above give the reasons",
                    "at least one complete checkpoint", "leave out --resume to start from scratch, in another "
                                                        "directory")


def restore(run: Run, kept: OpenCheckpoint | None) -> None:
    """Load the checkpoint that rank 0 has open (elsewhere None) on every rank. Collective.

    Random generators and compressor state return bit by bit where the ranks are as many in as many pipelines; else
    every rank keeps its fresh ones, seeded by (seed, rank). A checkpoint that does not fit changes nothing.
    """
    if run.saver is not None:
        run.saver.wait()
    meta = run.control.bcast(dict(kept.meta) if kept else None)
    copies = meta.get("pipeline", {}).get("copies") or [[rank] for rank in range(meta["world_size"])]
    alike, unlike = _alike(meta, copies, run)
    cursor = Cursor.from_dict(meta["cursor"])
    before, now = _schedule_before(run, meta, cursor), schedule_of(run, cursor)
    model_changes.resume(run, meta["step_rest"])
    shared, own = parts_of(run, held_by(run))
    rows = run.control.bcast([tuple(one) for group in kept.tensors.values() for one in group.heads()] if kept else [])
    kept_as, heads = _in_own_names(run, [Head(*row) for row in rows])

    def wants() -> list[Want]:
        if meta.get("framework") != run.spec.framework:
            raise UserError(f"the checkpoint is of a {meta.get('framework')} model",
                            f"one of {run.spec.framework}, as this model", "resume with the model of that run")
        run_length.check_resumed(before, run.config.schedule, now)
        return [*shared.wants(heads), *(own.wants(heads) if alike else ())]

    wanted = agreed(run.control, wants, "restore")
    groups = fetch(run.control, None if kept is None else kept.called(kept_as), wanted, heads)

    def read(group: str) -> dict[str, np.ndarray]:
        return groups.get(group, {})

    def load() -> str:
        run.feed.walk.shards.restored(cursor, meta.get("shards", ()))
        unfit = shared.load(read, meta["step_rest"])
        run.parts.optimizer.resumed(cursor.epoch, run_length.changed(before, now))
        if meta["config"].get("loss_scale", run.config.loss_scale) != run.config.loss_scale:
            run.parts.scale.restart()
        for callback, state in _states(run, meta["callbacks"]):
            callback.load_state_dict(decode_state(state))
            callback.restored(run)
        if alike:
            return "; ".join(filter(None, (unfit, own.load(read, {}))))
        run.dp.restart()
        return unfit

    unfit = agreed(run.control, load, "restore")
    run.state.cursor = cursor
    run.state.stop, run.state.wishes.stop, run.state.wishes.save, run.state.findings.metrics_at = "", "", False, -1
    if not alike:
        run.note(f"resumed a run of {ranks_of(copies)} on {unlike}: random generators "
                 "restart from the seed" + ("" if run.config.compression == "none" else ", compressor state from zero"))
    if unfit:
        run.note(unfit)
    if meta.get("samples", run.feed.samples) != run.feed.samples:
        run.note(f"resumed with {run.feed.samples} samples where the run had {meta.get('samples')}: "
                 "the order of the data differs")
    _tell_changes(run, meta["config"])
    _tell_schedule(run, before, now)


def restore_from(run: Run, place: str) -> None:
    """Load the checkpoint at a path or a URL, which may be a run's; collective."""
    config = replace(run.config, resume=place, out="")

    def look() -> OpenCheckpoint | None:
        if run.control.rank != 0:
            return None
        remote.fetch(config, run.note)
        return find(resume_path(config), None, run.note)

    restore(run, agreed(run.control, look, "restore"))
    if run.control.rank == 0:
        remote.forget(config)


def _in_own_names(run: Run, heads: list[Head]) -> tuple[dict[tuple[str, str], str], list[Head]]:
    """Return a checkpoint's names by (group, own name) where these differ, and ``heads`` by own names. Collective.

    Checkpoints of before 2026-11 name the tensors of a model with its wrappers, such as torch.compile's.
    """
    def tensor(head: Head) -> str:
        return head.name.rpartition("/")[0] if head.group == "optimizer" else head.name

    named = [head for head in heads if head.group in ("model", "optimizer", GROUP)]
    if run.spec.framework != "torch" or not any(WRAPPERS & set(tensor(head).split(".")) for head in named):
        return {}, heads
    params = [spec.name for spec in run.parts.params.specs]
    rows = run.control.gather((model_names(run.parts.state), params))
    own = {"model": {name for row, _ in rows for name in row}, "optimizer": {name for _, row in rows for name in row}}
    own[GROUP] = own["optimizer"]
    now = {group: fitting(own[group], {tensor(head) for head in named if head.group == group}) for group in own}
    called = [head._replace(name=now[head.group][tensor(head)] + head.name.removeprefix(tensor(head)))
              if tensor(head) in now.get(head.group, {}) else head for head in heads]
    return {(one.group, one.name): head.name for one, head in zip(called, heads) if one != head}, called


def _alike(meta: Mapping[str, Any], copies: list[list[int]], run: Run) -> tuple[bool, str]:
    """(whether each rank has the blocks that it had, else what the ranks are now as text)."""
    layout = run.parts.layout
    now = [list(copy) for copy in run.mesh.copies]
    if list(map(len, copies)) != list(map(len, now)):
        return False, ranks_of(now)
    cut = ([], []) if layout is None else (now, [list(starts) for starts in layout.starts])
    before = meta.get("pipeline", {})
    return (before.get("copies", []), before.get("starts", [])) == cut, f"{ranks_of(now)} with another partition"


def cut_before(config: Config, name: str, control: Control, devices: Sequence[str]) -> Before | None:
    """Return how the model was cut in the run that ``config.resume`` means, by its newest manifest; collective.

    None where there is none, or on other devices. Whether the checkpoint is whole is not looked at: `find` does.
    """
    if not config.resume or not cut_over_ranks(config):
        return None
    found = control.bcast(_newest_meta(config, name, control).get("pipeline"))
    if not found or found.get("devices") != list(devices):
        return None
    return Before(tuple(map(tuple, found["copies"])), tuple(map(tuple, found["starts"])), tuple(found["blocks"]))


def position(config: Config, name: str, control: Control) -> Cursor:
    """Return where the run that ``config.resume`` means stands by its newest manifest, else the start; collective."""
    if not config.resume:
        return Cursor()
    with contextlib.suppress(UserError):
        return Cursor.from_dict(control.bcast(_newest_meta(config, name, control).get("cursor")))
    return Cursor()


def _newest_meta(config: Config, name: str, control: Control) -> Mapping[str, Any]:
    """Return the meta of the newest manifest of the run that ``config.resume`` means, on rank 0; {} without any."""
    if control.rank:
        return {}
    with contextlib.suppress(CheckpointError, OSError, UserError, KeyError, ValueError):  # `find` says what is wrong
        out = find_out(config, name) if config.resume == "auto" else absolute(resume_path(config))
        for root in () if out is None else RunDirectory(out).roots:
            stored = CheckpointStore(root, 1).list()
            if stored:
                return inspect(stored[-1].path).meta
        return {} if out is None else inspect(out).meta
    return {}


def _schedule_before(run: Run, meta: Mapping[str, Any], at: Cursor) -> dict[str, Any]:
    """Return the schedule of the run that is resumed; of a checkpoint that lacks it by its configuration."""
    if "schedule" in meta:
        return dict(meta["schedule"])
    old, usual = meta["config"], Config()
    known = {k: v for k, v in old.get("schedule", {}).items() if k in vars(usual.schedule)}
    lengths = {key: old.get(key, getattr(usual, key)) for key in ("epochs", "max_steps")}
    config = replace(run.config, schedule=ScheduleConfig(**known), **lengths)
    per_epoch, left = run.feed.steps_per_epoch, run.feed.steps_left(at)
    with contextlib.suppress(UserError):
        config = run_length.filled(config, per_epoch, None, at, left)
    return json_able(run_length.kept(config.schedule, run_length.length(config, per_epoch, at, left)))


def _states(run: Run, kept: list[list[Any]] | dict[str, dict[str, Any]]) -> list[tuple[RunCallback, dict[str, Any]]]:
    """Return the callbacks that get a state back: the nth of a key the nth of that key in ``kept``.

    The first checkpoints of 0.1.0 hold a mapping by class name instead, in which the last of a class had replaced the
    others; it goes to the last.
    """
    names = [state_key_of(callback) for callback in run.callbacks]
    states: dict[str, list[dict[str, Any]]] = {}
    for name, state in kept.items() if isinstance(kept, dict) else kept:
        states.setdefault(name, []).append(state)
    for name in [n for n in states if isinstance(kept, dict) and names.count(n) > 1]:
        states[name][:0] = [{}] * (names.count(name) - 1)
        run.note(f"the checkpoint holds one state for {names.count(name)} callbacks {name}: the last one gets "
                 "it, the others start without state")
    found = [(callback, states[name].pop(0)) for callback, name in zip(run.callbacks, names) if states.get(name)]
    return [(callback, state) for callback, state in found if state]


def _flat(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``keys`` by `flat`, of data_parallel the name alone (0.1.0: a text): zero leaves results unchanged."""
    keys = dict(keys)
    if "data_parallel" in keys:
        way = keys["data_parallel"]
        name = way["name"] if isinstance(way, dict) else way
        keys["data_parallel"] = "replicate" if name == "zero" else name
    return flat(keys)


def _among(key: str, keys: Collection[str]) -> bool:
    """Return whether ``key``, or a section that it is in, is one of ``keys``."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in keys for n in range(1, len(parts) + 1))


def _tell_changes(run: Run, before: dict[str, Any]) -> None:
    """Name settings in force that change the result and differ from the resumed run's, or its defaults."""
    now, usual, old = (_flat(json_able(keys)) for keys in (run.config.to_dict(), Config().to_dict(), before))
    optimizer = run.parts.optimizer
    steered = any(callback.steers for callback in run.callbacks)
    quiet = schema.affecting(type(run.config), "nothing") | run.setup.idle | set(optimizer.overruled)
    # How a batch is cut matters only to what depends on the number of ranks too.
    quiet |= set() if run.parts.caveats() else schema.affecting(type(run.config), "split")
    # What is measured changes the result where something steers the run by it.
    quiet |= set() if steered else schema.affecting(type(run.config), "metrics")
    words = []
    for key in dict.fromkeys((*now, *old)):
        was, new = (side.get(key, usual.get(key)) for side in (old, now))
        empty = {} in (was, new) or [] in (was, new)
        if was != new and not (empty and None in (was, new)) and not _among(key, quiet):
            words.append(f"{key} {_shown(was)} -> {_shown(new)}")
    words += optimizer.changes
    if words:
        run.note(f"resumed with changed settings: {', '.join(words)}")


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def _tell_schedule(run: Run, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say that another schedule is in force than before the resume, and where it stands; or that it ends early."""
    own = now["own"]
    if own and own["end"] < own["steps"]:
        run.note(f"the optimizer's own schedule {own['name']} ends after {own['end']} steps of a run of "
                 f"{own['steps']}: after that the rate stays constant")
    if not run_length.changed(before, now):
        return
    same = before["name"].lower() == now["name"].lower()
    args = ", ".join(f"{key} {before['args'].get(key)} -> {value}" for key, value in now["args"].items()
                     if before["args"].get(key) != value) if same else ""
    what = f"schedule {now['name']}" if ScheduleConfig(now["name"]).on else "a constant rate"
    run.note(f"resumed with {what}{' of ' * bool(args)}{args}, as if from the start of the run: the next update's rate "
             f"is {run.parts.optimizer.learning_rate():.4g}")


def resume(run: Run) -> None:
    """Load what ``config.resume`` names; collective. Only reads: the run's directory is made when a fit starts."""
    resume = run.config.resume
    if not resume:
        return
    found: list[Any] = [None]

    def look() -> Path:
        out = find_out(run.config, run.spec.name) if resume == "auto" and run.control.rank == 0 else None
        if run.control.rank == 0:
            found[0] = find(resume_path(run.config), out, run.note)
        if resume == "auto" and out is not None and found[0] is None and (out / RunDirectory.COMPLETED).exists():
            raise UserError(f"resume auto: {out} holds a run that is complete and has no checkpoint to resume from",
                            "a checkpoint, or a directory without a finished run",
                            "leave out --resume, in another --out, to start from scratch")
        return out or Path()

    run.out = run.control.bcast(agreed(run.control, look, "resume"))
    if not run.control.bcast(found[0] is not None):
        run.note("resume auto: no checkpoint yet, starting from scratch")
        return
    restore(run, found[0])
    if run.control.rank == 0:
        remote.forget(run.config)
    run.note(f"resumed at step {run.state.cursor.step}, epoch {run.state.cursor.epoch}")
