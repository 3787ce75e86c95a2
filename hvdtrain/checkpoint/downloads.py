"""Folders of this host for runs under URLs, and what is downloaded into them.

Uploads are left to `hvdtrain.checkpoint.remote`. A downloaded checkpoint is verified before it gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.manifest import MANIFEST_NAME, CheckpointError, damaged
from hvdtrain.checkpoint.snapshot import BLOCK_BYTES, inspect, read_snapshot
from hvdtrain.checkpoint.store import CheckpointStore, Log
from hvdtrain.config import Config
from hvdtrain.core import RunFiles, user_cache
from hvdtrain.core.errors import UserError
from hvdtrain.core.object_store import ObjectStore, StorageError
from hvdtrain.core.resolve import absolute, check_url, is_url
from hvdtrain.core.terminal import say

READ_S = 3600.0
"""Longest download of a command."""

ATTEMPTS = "attempts"
"""Folder of a supervisor in a run's directory."""

_FOLDER = re.compile(r"(?:checkpoints/)?step-(\d{1,18})", re.ASCII)


def staging(url: str) -> Path:
    """Return the folder of this host in which a run under ``url`` works."""
    return user_cache("remote") / f"{_name(url)}-{_digest(url)[:12]}"


def copy_of(url: str) -> Path:
    """Return the folder for what this process downloads to read only; the next download removes it once that ended."""
    return user_cache("remote") / files.hidden_name("tmp", serial=_digest(url)[:8])


def local_path(out: str) -> Path:
    """Return where a run works: its directory, or the staging folder of a URL."""
    return staging(out) if is_url(out) else absolute(out)


def resume_path(config: Config) -> str:
    """Return ``config.resume`` with a path of this host in place of a URL."""
    if not is_url(config.resume):
        return config.resume
    return str(staging(config.out) if same(config) else copy_of(config.resume))


def shown(config: Config, out: Path) -> str:
    """Return where a run's files are, for messages."""
    return config.out if is_url(config.out) else str(out)


def refuse(what: str, run: str) -> None:
    """Raise `UserError` where a command that needs a local directory is given a URL."""
    check_url(what, run)
    if is_url(run):
        raise UserError(f"{what} is {run}", "a directory of this host", "copy the run to this host first; evaluate, "
                        "export, predict and report read URLs")


def same(config: Config) -> bool:
    """Return whether a run resumes from its own URL."""
    return config.resume.rstrip("/") == config.out.rstrip("/")


@contextlib.contextmanager
def storage_errors(what: str, do: str = "check the URL, the network and the storage's credentials") -> Iterator[None]:
    """Turn errors of the storage and of the local disk into `UserError`, for which a supervisor tries again."""
    try:
        yield
    except StorageError as error:
        raise UserError(f"{what}: {error}", "storage that this host can read and write", do).of_kind("disk") from None
    except OSError as error:
        raise UserError(f"{what}: {error}", "a writable cache directory with room",
                        "free space, or set XDG_CACHE_HOME to another directory").of_kind("disk") from None


def is_record(name: str) -> bool:
    """Return whether a stored file is neither of a checkpoint, nor of the final model or a supervisor."""
    return "/" not in name or name.partition("/")[0] not in (RunFiles.CHECKPOINTS, RunFiles.MODEL, ATTEMPTS)


def step_of(folder: str) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.rpartition("-")[2])


def folders(stored: Mapping[str, int], root: str) -> list[str]:
    """Return the folders under ``root``, "" or "checkpoints", that are named like checkpoints."""
    found = {name.rpartition("/")[0] for name in stored}
    return sorted(one for one in found if _FOLDER.fullmatch(one) and one.rpartition("/")[0] == root)


@contextlib.contextmanager
def copied(run: str, everything: bool) -> Iterator[Path]:
    """Yield the directory of RUN; of a URL a copy of its configuration and manifests, or of all its records."""
    check_url("RUN", run)
    if not is_url(run):
        yield absolute(run)
        return
    target = copy_of(run)

    def get(store: ObjectStore) -> None:
        stored = store.files()
        for name in stored:
            small = name in (RunFiles.CONFIG, RunFiles.COMPLETED) or name.endswith(f"/{MANIFEST_NAME}")
            if is_record(name) if everything else small:
                store.get(name, target / _name(run) / name)
        if not stored:
            raise UserError(f"{run} holds no run", "the URL of a run", "correct RUN")

    try:
        _fresh(target)
        with storage_errors(f"{run} cannot be read"):
            ObjectStore.open(run, "RUN").within(READ_S, f"reading {run}", get)
        yield target / _name(run)
    finally:
        files.remove_quietly(target)


def get_weights(run: str, target: Path, step: int | None, model: str) -> None:
    """Add to a copy of a run the checkpoint of ``step``, or for None the file ``model``, else the newest checkpoint."""
    def get(store: ObjectStore) -> None:
        stored = store.files()
        if step is None and model in stored and RunFiles.COMPLETED in stored:
            store.get(model, target / model)
        else:
            shutil.rmtree(target / RunFiles.CHECKPOINTS, ignore_errors=True)
            fetch_newest(store, stored, target, RunFiles.CHECKPOINTS, say, step)

    with storage_errors(f"{run} cannot be read"):
        ObjectStore.open(run, "RUN").within(READ_S, f"reading {run}", get)


def download(url: str, key: str, target: Path, log: Log, *, limit_s: float) -> None:
    """Download the checkpoint, or the newest complete one of the run, under ``url``, into ``target``. `UserError`."""
    def get(store: ObjectStore) -> None:
        stored = store.files()
        if MANIFEST_NAME in stored:
            fetch_one(store, stored, "", target)
        elif all(fetch_newest(store, stored, target, root, log) is None for root in ("", RunFiles.CHECKPOINTS)):
            raise UserError(f"there is no complete checkpoint in {url}", "the URL of a checkpoint or of a run",
                            f"correct {key}")

    check_url(key, url)
    _fresh(target)
    try:
        with storage_errors(f"{url} cannot be read"):
            ObjectStore.open(url, key).within(limit_s, f"reading {url}", get)
    except BaseException:
        files.remove_quietly(target)
        raise


def fetch_newest(store: ObjectStore, stored: Mapping[str, int], target: Path, root: str, log: Log,
                 wanted: int | None = None) -> Mapping[str, Any] | None:
    """Have the newest complete checkpoint, or that of step ``wanted``, in ``target``; return its meta, None without.

    `UserError` where all are damaged: such a run must not start from scratch.
    """
    remote = {step_of(one): one for one in folders(stored, root)}
    for step, one in list(remote.items()):
        if f"{one}/{MANIFEST_NAME}" not in stored:
            log(f"{one} of {store.url} is not used: its upload was not completed")
            del remote[step]
    home = target / root
    local = {one.step: one.path for one in CheckpointStore(home, 1).everything() if not one.hidden}
    meta: Mapping[str, Any] | None = None
    for step in sorted({*remote, *local}, reverse=True) if wanted is None else [wanted]:
        try:
            meta = have(store, stored, remote.get(step), local.get(step), home)
            break
        except CheckpointError as reason:
            log(f"the checkpoint of step {step} is not used: {reason}")
    if meta is None:
        if remote or local:
            raise UserError(f"no checkpoint in {store.url} can be used; the notes above give the reasons",
                            "at least one complete checkpoint", "leave out --resume to start from scratch, with "
                                                                "another --out")
        return None
    return meta


def have(store: ObjectStore, stored: Mapping[str, int], folder: str | None, path: Path | None,
         home: Path) -> Mapping[str, Any]:
    """Return the meta of a checkpoint that is whole in ``home``, downloaded from ``folder`` unless it was."""
    if path is not None:
        try:
            return read_snapshot(path).meta
        except CheckpointError:
            if folder is None:
                raise
            files.discard(path)
    if folder is None:
        raise CheckpointError("it is not stored", "a stored checkpoint", "name another step")
    return fetch_one(store, stored, folder, home / folder.rpartition("/")[2])


def fetch_one(store: ObjectStore, stored: Mapping[str, int], folder: str, target: Path) -> Mapping[str, Any]:
    """Download the checkpoint ``folder`` as the directory ``target`` and verify it; return its meta."""
    prefix = f"{folder}/" if folder else ""
    files.make_directories(target.parent)
    temp = files.make_temp(target.parent)
    try:
        store.get(f"{prefix}{MANIFEST_NAME}", temp / MANIFEST_NAME)
        entries = inspect(temp).files
        for name, entry in entries.items():
            if stored.get(f"{prefix}{name}") != entry.size_bytes:
                raise damaged(f"{folder or store.url} lacks {name}", f"{entry.size_bytes} bytes")
        files.require_space(temp, sum(entry.size_bytes + BLOCK_BYTES for entry in entries.values()))
        for name in entries:
            store.get(f"{prefix}{name}", temp / name)
        meta = read_snapshot(temp).meta
        files.publish(temp, target)
    except BaseException:
        files.remove_quietly(temp)
        raise
    return meta


def _fresh(target: Path) -> None:
    """Empty the place of a download, and remove those of processes that ended."""
    with storage_errors(f"{target.parent} cannot be used"):
        files.make_directories(target.parent)
        for left in files.leftovers(target.parent):
            if left.path == target or left.pid != os.getpid() and files.writer_is_gone(left):
                files.remove_quietly(left.path)


def _name(url: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", url.rstrip("/").rpartition("/")[2]).strip("-.")[:40] or "run"


def _digest(url: str) -> str:
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()
