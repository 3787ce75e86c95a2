"""Copy the shards of a URL (``s3://bucket/*.tar``) to a folder of this host, once, checked, and within a bound.

Owns the folder, its records and what is removed from it. `hvdtrain.core.object_store` calls fsspec, and
`hvdtrain.data.kept` divides the shards among the processes of a host.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.core import whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.core.object_store import ObjectStore, StorageError
from hvdtrain.core.resolve import redacted
from hvdtrain.core.units import GIB, format_bytes
from hvdtrain.data.index import Stamp
from hvdtrain.data.kept import WAIT_S, make_all, user_cache

T = TypeVar("T")

FOLDER = "shards"
LIST_S, EACH_S = 120.0, 0.1  # longest time to list the files of a URL, and to look at one of them
_PIECE = 1 << 22
_users: list[int] = []
"""Descriptors of folders in use, locked while this process lives, so that no other job removes what it reads."""


def local_copies(url: str, key: str, cache: str, most_gib: float) -> list[str]:
    """Return copies on this host of the files that the pattern ``url`` means, in the order of their names.

    In ``cache``/shards, else in $XDG_CACHE_HOME/hvdtrain/shards, of at most ``most_gib``: copies of other URLs that no
    process uses are removed for it, those used longest ago first. Errors: `UserError` for a URL that cannot be read,
    for a pattern without files, and where the files need more room.
    """
    base, pattern = _split(url)
    store = ObjectStore.open(base, f"data.args.{key}")
    sizes = {name: size for name, size in _within(store, LIST_S, "the listing", ObjectStore.files).items()
             if matches(name.split("/"), pattern.split("/"))}
    if not sizes:
        raise UserError(f"no file is {redacted(url)}, of data.args.{key}", "a pattern of files that are stored",
                        f"correct data.args.{key}")
    folder = (Path(cache).expanduser() if cache else user_cache("")) / FOLDER / hashlib.sha256(
        base.encode()).hexdigest()[:16]
    names = sorted(sizes)
    targets = [folder / name for name in names]
    try:
        _use(folder)
        _make_room(folder, {name: sizes[name] for name, target in zip(names, targets) if not target.exists()},
                   sum(sizes.values()), int(most_gib * GIB))
        versions = _within(store, LIST_S + EACH_S * len(names), "the listing",
                           lambda there: [there.version(name) for name in names])
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        make_all(targets, lambda i: _is_copy(targets[i], versions[i]),
                 lambda i: _copy(store, names[i], targets[i], versions[i]), "downloading a shard")
    except StorageError:
        raise
    except OSError as error:
        raise UserError(f"shards cannot be kept in {folder}: {error.strerror or error}",
                        "a writable folder with free space", "set data.args.cache to one") from None
    return [str(target) for target in targets]


def _split(url: str) -> tuple[str, str]:
    """Return the folder of a pattern that holds no wildcard, and the rest."""
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    at = next((i for i, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts) - 1)
    return f"{scheme}://{'/'.join(parts[:at])}", "/".join(parts[at:])


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the folders and the name of a file fit a pattern as `glob.glob` reads it: ``**`` is any folders.

    >>> matches(["old", "a.tar"], ["*.tar"]), matches(["a.tar"], ["**", "*.tar"])
    (False, True)
    """
    if not pattern or not parts:
        return not pattern and not parts
    if pattern[0] == "**" and len(pattern) > 1:
        return any(matches(parts[i:], pattern[1:]) for i in range(len(parts)))
    return pattern[0] == "**" or fnmatch.fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:])


def _within(store: ObjectStore, limit_s: float, what: str, work: Callable[[ObjectStore], T]) -> T:
    try:
        return store.within(limit_s, what, work)
    except (StorageError, FileNotFoundError) as error:
        raise UserError(f"{redacted(store.url)} cannot be read: {error}", "storage that answers",
                        "check the URL, the credentials and the network") from None


def _use(folder: Path) -> None:
    """Mark ``folder`` as used now, and as in use until this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.utime(descriptor)
    with contextlib.suppress(OSError):  # without locks nothing is removed either
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    _users.append(descriptor)


def _make_room(folder: Path, lacking: Mapping[str, int], whole: int, most: int) -> None:
    """Remove folders of other URLs until the files that are ``lacking`` fit into ``most`` bytes."""
    if whole > most:
        raise UserError(f"the shards take {format_bytes(whole)}, and data.args.cache_gib allows {format_bytes(most)}",
                        "room for all of them, since samples are read in random order",
                        "raise data.args.cache_gib, or copy the files to storage that all hosts mount")
    others = [each for each in folder.parent.iterdir() if each.is_dir()] if lacking else []
    used = {each: _bytes(each) for each in others}
    for each in sorted(others, key=lambda each: _used_at(each)):
        if sum(used.values()) + sum(lacking.values()) <= most:
            return
        if each != folder and _remove(each):
            del used[each]


def _bytes(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another job removes it
            found += path.stat().st_size if path.is_file() else 0
    return found


def _used_at(folder: Path) -> float:
    try:
        return (folder / ".used").stat().st_mtime
    except OSError:
        return 0.0


def _remove(folder: Path) -> bool:
    """Remove the copies of a URL unless a process uses them."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / ".used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            return True
        finally:
            os.close(descriptor)
    return False


def _is_copy(target: Path, version: str) -> bool:
    """Return whether ``target`` is a whole copy of this version; reads it where its time is not the recorded one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UserError):
        kept: dict[str, Any] = json.loads(_record(target).read_text(encoding="utf-8"))
        if kept["version"] != version:
            return False
        stamp = Stamp.of(str(target))
        if stamp.size == kept["size"]:
            return stamp.mtime_ns == kept["mtime_ns"] or _crc(target) == kept["crc32"]
    return False


def _copy(store: ObjectStore, name: str, target: Path, version: str) -> None:
    with whole_file(target) as draft:
        _within(store, WAIT_S, f"reading {name}", lambda there: there.get(name, draft))
        size, stored = draft.stat().st_size, version.partition(" ")[0]
        if stored.isdigit() and int(stored) != size:
            raise UserError(f"{size} bytes of {redacted(store.url)}/{name} arrived, of {stored}", "the whole file",
                            "start again, and check the network")
        crc = _crc(draft)
    stamp = Stamp.of(str(target))
    if _within(store, LIST_S, f"looking at {name}", partial(_fresh, name=name)) != version:
        raise UserError(f"{redacted(store.url)}/{name} changed while it was downloaded", "files that do not change",
                        "start again when no program writes to them")
    with whole_file(_record(target)) as draft:
        draft.write_text(json.dumps({"version": version, "size": stamp.size, "mtime_ns": stamp.mtime_ns, "crc32": crc,
                                     "time": round(time.time())}), encoding="utf-8")


def _fresh(store: ObjectStore, name: str) -> str:
    store.forget()
    return store.version(name)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        for piece in iter(partial(file.read, _PIECE), b""):
            crc = zlib.crc32(piece, crc)
    return crc


def _record(target: Path) -> Path:
    return target.with_name(f".{target.name}.json")
