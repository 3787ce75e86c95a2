"""Choose a run's directory so that no run's files are overwritten, and write ``config.yaml`` and ``completed.json``.

A job has succeeded if and only if ``completed.json`` exists: an MPI launcher's exit status is unreliable after a node
was lost. A directory stays unchanged until `begin`, when all ranks have agreed to train.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvdtrain.checkpoint import files, remote, weights
from hvdtrain.checkpoint.downloads import local_path
from hvdtrain.checkpoint.remote import RemoteRun
from hvdtrain.cluster.control import agreed
from hvdtrain.config import Config
from hvdtrain.config import yaml_file as recipe
from hvdtrain.core import RunFiles
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.core.resolve import absolute, is_url

MOST_JSON_BYTES = 16 * 2**20  # a larger ``completed.json`` is none of a run's


@dataclass(frozen=True)
class RunDirectory(RunFiles):
    """Open the files of a run in its directory ``path``."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoints."""
        return self.path / self.CHECKPOINTS

    @property
    def roots(self) -> tuple[Path, Path]:
        """Return folders that may hold checkpoints: ``path`` may be a run's directory or its checkpoints."""
        return self.path, self.checkpoints

    @property
    def completed(self) -> dict[str, Any] | None:
        """Return the record of a run that has ended well; None without one, {} where it is unreadable."""
        file = self.path / self.COMPLETED
        try:
            found = json.loads(file.read_bytes()) if file.stat().st_size <= MOST_JSON_BYTES else {}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def config(self) -> dict[str, Any]:
        """Return the keys that the run was given, as plain data; {} where they cannot be read."""
        with contextlib.suppress(UserError, OSError):
            return recipe.read(str(self.path / self.CONFIG))
        return {}

    def model(self) -> dict[str, np.ndarray]:
        """Return the arrays of the final model by name. OSError without one."""
        from safetensors.numpy import load_file

        return load_file(str(self.path / self.MODEL / weights.FILE))


@dataclass
class RunOutput:
    """A run's directory. ``out``: its path once `ensure_out` has made it, before that the current directory.

    ``made``: directories that were made for ``out``, innermost first. ``lock``: descriptor by which rank 0 keeps other
    jobs out while it trains; -1: none. ``begun``: a fit has begun to write into ``out`` (`begin`). ``storage``: on rank
    0 of a run under a URL, for which ``out`` is the staging folder; ``opened`` on every rank once it is there.
    """

    out: Path = Path()
    made: list[Path] = field(default_factory=list)
    lock: int = -1
    begun: bool = False
    storage: RemoteRun | None = None
    opened: bool = False


class NamedModel(Protocol):
    """A model after which its run's directory is named."""

    @property
    def name(self) -> str: ...


class TrainingPosition(Protocol):
    """The state of a run that says whether anything is left to train."""

    cursor: Cursor
    requeue: bool


class DirectoryRun(Protocol):
    """The attributes of a `hvdtrain.engine.run.Run` that this file needs."""

    config: Config
    control: Control
    directory: RunOutput

    @property
    def spec(self) -> NamedModel: ...

    @property
    def state(self) -> TrainingPosition: ...

    def note(self, text: str) -> None: ...

    def stopping(self) -> bool: ...


def ensure_out(run: DirectoryRun) -> Path:
    """Find or make the run's directory, by rank 0 on first use, and broadcast it. Collective.

    Empty ``config.out``: a new ``runs/MODEL-NNN``; with ``resume auto`` the newest of that model. A given directory
    that already holds a run is refused unless it is resumed. Nothing in an existing directory is changed.
    """
    if run.directory.out == Path():
        def on_root() -> tuple[Path, list[Path]]:
            return choose(run.config, run.spec.name) if run.control.rank == 0 else (Path(), [])

        run.directory.out, run.directory.made = run.control.bcast(agreed(run.control, on_root, "out"))
    if is_url(run.config.out) and not run.directory.opened:
        def storage() -> RemoteRun | None:
            return RemoteRun(run.config) if run.control.rank == 0 else None

        run.directory.storage, run.directory.opened = agreed(run.control, storage, "out"), True
    return run.directory.out


def find_out(config: Config, name: str) -> Path | None:
    """Return the directory that ``resume auto`` continues in, None where there is none yet; makes nothing."""
    with contextlib.suppress(OSError):  # what cannot even be looked at cannot be made: `ensure_out` says so
        path = local_path(config.out) if config.out else _newest(absolute("runs"), name)
        return path if path is not None and path.is_dir() else None
    return None


@contextlib.contextmanager
def starting(run: DirectoryRun) -> Iterator[None]:
    """Make the directory, run the body, which may refuse a fit, then `begin`; else remove it if empty. Collective."""
    run.directory.begun = False
    ensure_out(run)
    try:
        yield
    except BaseException:
        _give_back(run)
        raise
    begin(run)


def release(run: DirectoryRun) -> None:
    """Let other jobs train in the run's directory again; rank 0's part."""
    lock, run.directory.lock = run.directory.lock, -1
    if lock >= 0:
        os.close(lock)


def _lock(run: DirectoryRun) -> None:
    """Keep other jobs out of the run's directory while this process has it open; `UserError` if one has it."""
    release(run)
    try:
        run.directory.lock = files.lock(run.directory.out)
    except BlockingIOError:
        raise UserError(f"another job is training in {run.directory.out}", "a separate directory for each job",
                        "wait for that job, or choose another --out") from None


def begin(run: DirectoryRun) -> None:
    """Write ``config.yaml`` and remove ``completed.json``, unless nothing is left to train. Collective."""
    left = run.state.cursor.epoch < run.config.epochs and not run.stopping()

    def write() -> bool:
        if run.control.rank != 0:
            return True
        try:
            if not left and (run.directory.out / RunDirectory.COMPLETED).exists():
                return False
            _lock(run)
            if run.directory.storage is not None:
                run.directory.storage.claim()
            keep_config(run)
            (run.directory.out / RunDirectory.COMPLETED).unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(error) from None
        return True

    try:
        run.directory.begun = run.control.bcast(agreed(run.control, write, "out"))
    except UserError:
        _give_back(run)
        raise
    run.directory.made = []
    if run.state.requeue:
        return  # ended by a signal before it began: the note would be wrong
    if not run.directory.begun:
        run.note(f"nothing is left to train: {run.directory.out} holds a complete run; its "
                 "files are unchanged")
    elif not left and run.state.cursor.step > 0:
        run.note(f"nothing is left to train after step {run.state.cursor.step}")


def keep_config(run: DirectoryRun) -> None:
    """Write the configuration into the run's directory; rank 0 only."""
    _write(run.directory.out / RunDirectory.CONFIG, _yaml(run.config))


def checkpoint_written(run: DirectoryRun, path: Path) -> None:
    """Write the configuration where it lacks: saved without a fit, or after the directory was deleted; rank 0 only.

    Then upload the checkpoint of a run under a URL, which counts as saved only when it is stored there. StorageError.
    """
    with contextlib.suppress(OSError):  # the checkpoint holds the configuration too
        if not (run.directory.out / RunDirectory.CONFIG).exists():
            keep_config(run)
    if run.directory.storage is not None:
        run.directory.storage.saved(path, run.config.checkpoint.keep)


def choose(config: Config, name: str) -> tuple[Path, list[Path]]:
    """Return the run's directory and the directories made for it; `UserError` if it already holds a run."""
    if is_url(config.out):
        return remote.prepared(config), []
    found = find_out(config, name) if config.resume == "auto" else None
    if found is not None:
        return found, []
    path = absolute(config.out or "runs")
    try:
        if config.out and not config.resume and any((path / trace).exists() for trace in RunDirectory.TRACES):
            raise UserError(f"{path} already holds a run", "a new directory, so that nothing is overwritten",
                            "add --resume auto to continue the run, or choose another --out")
        made = [parent for parent in (path, *path.parents) if not parent.exists()]
        path.mkdir(parents=True, exist_ok=True)
        if not config.out:
            path = _numbered(path, name)
            made.insert(0, path)
    except OSError as error:
        raise _unusable(error) from None
    return path, made


def _unusable(error: OSError) -> UserError:
    return UserError(f"the run's directory cannot be made: {error}", "a writable place",
                     "choose another --out").of_kind(kind_of(error))


def kind_of(error: OSError) -> str:
    """Return the cause that a supervisor sees: a "disk" that may have room again, or a "user"'s mistake."""
    return "disk" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE) else "user"


def _give_back(run: DirectoryRun) -> None:
    """Remove directories made for a run that does not begin, where empty; rank 0's part."""
    made, run.directory.made = run.directory.made, []
    if made:
        run.directory.out = Path()
    with contextlib.suppress(OSError):  # not empty: somebody uses it
        for path in made if run.control.rank == 0 else ():
            path.rmdir()


def _taken(root: Path, name: str) -> tuple[str, list[int]]:
    """Return the stem of this model's directories under ``root``, and the numbers in use, in order."""
    file = Path(name[3:] if name.startswith("hf:") else name.rpartition(":")[0] or name).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", file).strip("-.") or "run"
    found = (re.fullmatch(re.escape(stem) + r"-(\d+)", path.name) for path in root.glob(f"{stem}-*"))
    return stem, sorted(int(match[1]) for match in found if match)


def _newest(root: Path, name: str) -> Path | None:
    stem, taken = _taken(root, name)
    return root / f"{stem}-{taken[-1]:03d}" if taken else None


def _numbered(root: Path, name: str) -> Path:
    stem, taken = _taken(root, name)
    number = taken[-1] + 1 if taken else 1
    while True:
        path = root / f"{stem}-{number:03d}"
        try:
            path.mkdir()
            return path
        except FileExistsError:  # another job took it meanwhile
            number += 1


def _yaml(config: Config) -> str:
    return recipe.dump(json.loads(json.dumps(config.to_dict(), default=repr)))


def complete(run: DirectoryRun, record: dict[str, Any]) -> None:
    """Write the completion record, of a run under a URL when everything else is stored there; rank 0 only.

    Errors: OSError; `UserError` of the storage, and then the record is not there.
    """
    out, storage = run.directory.out, run.directory.storage
    if storage is not None:
        storage.sync()
    write_completed(out, record)
    if storage is not None:
        try:
            storage.sync()
        except UserError:
            (out / RunDirectory.COMPLETED).unlink(missing_ok=True)
            raise


def write_completed(path: Path, record: dict[str, Any]) -> None:
    """Write the completion record atomically."""
    _write(path / RunDirectory.COMPLETED, json.dumps(record, indent=1, default=str) + "\n")


def _write(path: Path, text: str) -> None:
    with files.replacing(path) as place:
        place.write_text(text, encoding="utf-8")
