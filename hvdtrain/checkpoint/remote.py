"""Keep a run under a URL: rank 0 works in a staging folder of its host, from which finished files are uploaded.

Owns which files are stored, in which order, and what is downloaded to resume or to evaluate. A checkpoint's manifest is
uploaded last and removed first, so that a folder without one is never taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.downloads import (
    ATTEMPTS,
    copy_of,
    download,
    fetch_newest,
    folders,
    have,
    is_record,
    same,
    staging,
    step_of,
    storage_errors,
)
from hvdtrain.checkpoint.manifest import MANIFEST_NAME, CheckpointError, FileEntry, decode
from hvdtrain.checkpoint.snapshot import inspect
from hvdtrain.checkpoint.store import CheckpointStore, Log, best_of
from hvdtrain.cluster.liveness import causes, pulse
from hvdtrain.config import Config
from hvdtrain.core import RunFiles
from hvdtrain.core.errors import UserError
from hvdtrain.core.object_store import ObjectStore, StorageError, is_plain
from hvdtrain.core.resolve import is_url
from hvdtrain.core.terminal import say

OWNER = "owner.json"
"""Names the job that writes under a URL."""

PART = 0.8
"""Part of control_timeout_s that one transfer may take: the other ranks may be waiting for rank 0."""

MARGIN_S = 2.0
"""Seconds before the end of a known time limit at which a transfer is given up."""

LAST_S, FAILED_S = 30.0, 5.0
"""Longest upload of the report and the last records after a run's end, and after its failure."""

SUPERVISED = (ATTEMPTS, "history.jsonl")
"""What a supervisor keeps in the staging folder before rank 0 starts."""

UPLOAD = "it could not be uploaded to"
"""Begin of the error of a checkpoint that is complete in the staging folder."""


def limit_s(config: Config) -> float:
    """Return the seconds that a transfer may take now."""
    ends_at = causes.ends_at(config.time_limit_s())
    left_s = ends_at - time.time() - MARGIN_S if ends_at else float("inf")
    return max(1.0, min(PART * config.control_timeout_s, left_s))


def fetch(config: Config, log: Log) -> None:
    """Download what ``config.resume`` needs of URLs; rank 0 only. Errors: `UserError`."""
    if config.resume and is_url(config.out):
        RemoteRun(config).pull(log)
    if is_url(config.resume) and not same(config):
        download(config.resume, "resume", copy_of(config.resume), log, limit_s=limit_s(config))


def forget(config: Config) -> None:
    """Remove what `fetch` has downloaded to be read once."""
    if is_url(config.resume) and not same(config):
        files.remove_quietly(copy_of(config.resume))


def prepared(config: Config, spared: Collection[str] = SUPERVISED) -> Path:
    """Make and return the staging folder, without ``spared`` names; `UserError` where a run is there already."""
    local = staging(config.out)

    def look(store: ObjectStore) -> tuple[Collection[str], bool]:
        stored = store.files()
        return stored, _is_own(local, store, stored)

    if not config.resume:
        with storage_errors(f"{config.out} cannot be used"), _locked(local):
            stored, own = ObjectStore.open(config.out, "out").within(limit_s(config), "the listing", look)
            if any(name.partition("/")[0] in RunFiles.TRACES for name in stored):
                raise UserError(f"{config.out} already holds a run", "a new URL, so that nothing is overwritten",
                                "add --resume auto to continue the run, or choose another --out")
            if own and any((local / name).exists() for name in (RunFiles.CHECKPOINTS, RunFiles.MODEL)):
                raise UserError(f"{local} holds files of a run that are not stored in {config.out}", "a new URL, so "
                                "that nothing is overwritten", "add --resume auto to continue the run, remove that "
                                "folder, or choose another --out")
            clear(local, spared)
    local.mkdir(parents=True, exist_ok=True)
    return local


def clear(local: Path, but: Collection[str] = ()) -> None:
    """Empty a staging folder: what another job has left there is not the run under the URL. OSError."""
    for path in local.iterdir() if local.is_dir() else ():
        if path.name not in but:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class RemoteRun:
    """A run under ``config.out`` and its staging folder ``local``; used on rank 0 only.

    ``claimed``: this job writes ``owner.json`` there, which is its lock: a job that finds another one's name stops.
    """

    def __init__(self, config: Config) -> None:
        self.url, self.local, self._config = config.out, staging(config.out), config
        self._store = ObjectStore.open(config.out, "out")
        self._owner, self._newest = b"", ""
        self._sent: dict[str, tuple[int, int]] = {}

    @property
    def claimed(self) -> bool:
        return bool(self._owner)

    def pull(self, log: Log) -> None:
        """Bring the staging folder to the state of the URL: the newest complete checkpoint, the best, the records."""
        with storage_errors(f"{self.url} cannot be used"), _locked(self.local):
            self._store.within(limit_s(self._config), f"reading {self.url}", partial(self._pull, log=log))

    def _pull(self, store: ObjectStore, log: Log) -> None:
        stored = store.files()
        if not _is_own(self.local, store, stored):
            clear(self.local, SUPERVISED)
        for name in stored:
            if is_record(name) and name != OWNER and not (self.local / name).exists():
                store.get(name, self.local / name)
        meta = fetch_newest(store, stored, self.local, RunFiles.CHECKPOINTS, log) or {}
        remote = {step_of(one): one for one in folders(stored, RunFiles.CHECKPOINTS)
                  if f"{one}/{MANIFEST_NAME}" in stored}
        local = {one.step: one.path for one in CheckpointStore(self.local / RunFiles.CHECKPOINTS, 1).list()}
        for best in best_of(meta, {*remote, *local}):
            try:
                have(store, stored, remote.get(best), local.get(best), self.local / RunFiles.CHECKPOINTS)
            except CheckpointError as reason:
                log(f"the best checkpoint, of step {best}, cannot be read: {reason}")

    def claim(self) -> None:
        """Have other jobs find that this one writes here, and withdraw ``completed.json``. `UserError`."""
        pulse.at("writing to storage")
        with storage_errors(f"{self.url} cannot be used"):
            self._store.within(limit_s(self._config), f"writing to {self.url}", self._claim)

    def _claim(self, store: ObjectStore) -> None:
        self._check_owner(store)
        store.remove([RunFiles.COMPLETED])

    def _check_owner(self, store: ObjectStore) -> None:
        """Become the owner, once; StorageError where another job became it since."""
        if self._owner:
            with contextlib.suppress(FileNotFoundError):
                if (found := store.read(OWNER)) == self._owner:
                    return
                raise StorageError(f"another job writes to {self.url}: {_described(found)}")
        owner = self._owner or json.dumps({"job": secrets.token_hex(8), "host": socket.gethostname(),
                                           "pid": os.getpid(), "time": round(time.time(), 3)}).encode() + b"\n"
        with files.replacing(self.local / OWNER) as draft:
            draft.write_bytes(owner)
            store.put(draft, OWNER)
        self._owner = owner

    def saved(self, path: Path, keep: int) -> None:
        """Upload a checkpoint that is complete in the staging folder, then the records; StorageError."""
        try:
            self._store.within(limit_s(self._config), "the upload", partial(self._upload, path=path, keep=keep))
        except StorageError as error:
            raise StorageError(f"{UPLOAD} {self.url} ({error}); it is in {path} on host "
                               f"{socket.gethostname()}") from None

    def _upload(self, store: ObjectStore, path: Path, keep: int) -> None:
        self._check_owner(store)
        manifest, stored = inspect(path), store.files()
        folder = f"{RunFiles.CHECKPOINTS}/{path.name}"
        # The last step may be saved by its number and at the end. What an earlier job has stored may be damaged.
        before = _stored_entries(store, stored, folder) if folder == self._newest else {}
        changed = [name for name, entry in manifest.files.items() if before.get(name) != entry]
        if changed:
            self._remove(store, {name: size for name, size in stored.items()
                                 if name.rpartition("/")[2] not in set(manifest.files) - set(changed)}, folder)
        for name in (*changed, MANIFEST_NAME):
            store.put(path / name, f"{folder}/{name}")
        self._newest = folder
        self._sync(store)
        try:
            self._prune(store, stored, folder, manifest.meta, keep)
        except StorageError as error:
            say(f"note: {folder} is stored, but older checkpoints could not be removed: {error}")

    def _prune(self, store: ObjectStore, stored: Mapping[str, int], folder: str, meta: Mapping[str, Any],
               keep: int) -> None:
        """Remove checkpoints before ``folder`` as `CheckpointStore` does, and incomplete uploads before it."""
        steps = {step_of(one): one for one in folders(stored, RunFiles.CHECKPOINTS)}
        saved = step_of(folder)
        whole = {step for step, one in steps.items() if f"{one}/{MANIFEST_NAME}" in stored} | {saved}
        kept = {*sorted(step for step in whole if step <= saved)[-keep:], *best_of(meta, whole)}
        for step, one in steps.items():
            if step < saved and step not in kept:
                self._remove(store, stored, one)

    @staticmethod
    def _remove(store: ObjectStore, stored: Mapping[str, int], folder: str) -> None:
        names = [name for name in stored if name.startswith(f"{folder}/")]
        store.remove(sorted(names, key=lambda name: name != f"{folder}/{MANIFEST_NAME}"))
        store.remove_folder(folder)

    def _sync(self, store: ObjectStore) -> None:
        """Upload all files but checkpoints that have changed since the last time, ``completed.json`` last."""
        found = [path for path in sorted(self.local.rglob("*")) if path.is_file() and not path.is_symlink()]
        for path in sorted(found, key=lambda path: path == self.local / RunFiles.COMPLETED):
            name = path.relative_to(self.local).as_posix()
            if not is_plain(name) or name == OWNER or name.partition("/")[0] in (RunFiles.CHECKPOINTS, ATTEMPTS):
                continue
            now = (path.stat().st_size, path.stat().st_mtime_ns)
            if self._sent.get(name) != now:
                store.put(path, name)
                self._sent[name] = now

    def sync(self) -> None:
        """Upload the model, records and other files of the run. `UserError`."""
        pulse.at("uploading the run's files")
        with storage_errors(f"the final files could not be uploaded to {self.url}", f"the files are in {self.local} on "
                            f"host {socket.gethostname()}; --resume auto tries again there"):
            self._store.within(limit_s(self._config), "the upload", self._owned_sync)

    def _owned_sync(self, store: ObjectStore) -> None:
        self._check_owner(store)
        self._sync(store)

    def finish(self, failed: bool) -> None:
        """Upload the report and the last records, and print what is where; a failure is a note."""
        if not self.claimed:
            return
        pulse.at("uploading the run's files")
        try:
            self._store.within(min(FAILED_S if failed else LAST_S, limit_s(self._config)), "the upload",
                               self._owned_sync)
        except Exception as error:
            say(f"note: the last records and the report are not in {self.url} ({error}); they are in {self.local}")
        else:
            say(f"files in {self.url}, with a local copy in {self.local}")


def _is_own(local: Path, store: ObjectStore, stored: Collection[str]) -> bool:
    """Return whether the last job under the URL worked in this staging folder: it may be ahead of the URL."""
    try:
        owner = (local / OWNER).read_bytes()
    except OSError:
        return False
    return OWNER in stored and store.read(OWNER) == owner


def _stored_entries(store: ObjectStore, stored: Mapping[str, int], folder: str) -> dict[str, FileEntry]:
    """Return the files of a stored checkpoint that are there in their sizes; {} where it has no good manifest."""
    if f"{folder}/{MANIFEST_NAME}" not in stored:
        return {}
    with contextlib.suppress(CheckpointError, FileNotFoundError):
        entries = decode(store.read(f"{folder}/{MANIFEST_NAME}"), folder).files
        return {name: entry for name, entry in entries.items() if stored.get(f"{folder}/{name}") == entry.size_bytes}
    return {}


@contextlib.contextmanager
def _locked(local: Path) -> Iterator[None]:
    """Keep the jobs of this host out of a staging folder; `UserError` where one trains in it."""
    files.make_directories(local)
    try:
        lock = files.lock(local)
    except BlockingIOError:
        raise UserError(f"another job on this host is training in {local}", "a separate URL for each job",
                        "wait for that job, or choose another --out") from None
    try:
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def _described(owner: bytes) -> str:
    """Return which job wrote ``owner.json``."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        row = json.loads(owner)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        return f"process {row['pid']} on host {row['host']}, since {since}"
    return "its owner.json cannot be read"
