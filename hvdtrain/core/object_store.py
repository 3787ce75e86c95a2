"""Read and write the files under a URL by fsspec, with retries and a deadline; every failure is a `StorageError`.

Owns the calls of fsspec and their errors. `hvdtrain.checkpoint.remote` decides which files of a run are stored,
`hvdtrain.data.downloads` which shards are copied.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import check_url, not_installed, redacted

T = TypeVar("T")

RETRY_WAITS_S = (0.5, 2.0, 8.0)
"""Waits between the attempts of one call."""

VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "updated", "mtime", "Content-MD5",
            "Digest", "Last-Modified", "blob_id", "sha", "modificationTime", "modification_time", "modified", "modify",
            "last_write_time", "created")
"""Entries of a storage's description of a file that change with it, in S3, Google, Azure, SFTP, HTTP, the Hugging Face
hub, GitHub, HDFS, DBFS, WebDAV, FTP and SMB: fsspec's own `ukey` differs between a listing and a request for one file.
"""

LATE_S = 0.5
"""A call that notices the deadline itself has a better message than the thread that waits for it."""

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
             "sftp": "paramiko", "ssh": "paramiko", "hdfs": "pyarrow", "http": "aiohttp", "https": "aiohttp"}
"""Packages that fsspec needs beside itself, by scheme."""


class StorageError(OSError):
    """A call of the storage that failed, or took too long."""


@dataclass(frozen=True)
class ObjectStore:
    """Files under ``url``, named relative to it. ``ends_at``: monotonic seconds after which no call begins."""

    url: str
    fs: Any
    root: str
    ends_at: float = float("inf")

    @classmethod
    def open(cls, url: str, key: str) -> ObjectStore:
        """Return the storage of ``url``, the value of ``key``. `UserError` where a package lacks; asks no server."""
        check_url(key, url)
        scheme = url.partition("://")[0].lower()
        try:
            core = importlib.import_module("fsspec.core")
        except ModuleNotFoundError:
            raise not_installed(f"{key} {scheme}://", "fsspec", "remote") from None
        try:
            fs, root = core.url_to_fs(url.rstrip("/"), skip_instance_cache=True)
        except ImportError as error:
            package = _PACKAGES.get(scheme, f"a package for {scheme}://")
            raise UserError(f"{key} {scheme}:// needs {package}, which is not installed ({redacted(str(error))})",
                            f"{package} installed for this Python", f"run pip install {package}") from None
        except Exception as error:  # of any package
            raise UserError(f"{key} {url} cannot be opened: {_text(error)}", "a URL that fsspec opens",
                            f"correct {key}, or the storage's credentials") from None
        if not str(root).strip("/"):
            raise UserError(f"{key} is {url}", f"a folder, such as {scheme}://bucket/run", f"correct {key}")
        return cls(url.rstrip("/"), fs, str(root).rstrip("/"))

    def within(self, limit_s: float, what: str, work: Callable[[ObjectStore], T]) -> T:
        """Return ``work(store)``, in a thread that is given up after ``limit_s``; its later calls fail then."""
        store = replace(self, ends_at=time.monotonic() + limit_s)
        answers: queue.SimpleQueue[tuple[list[T], BaseException | None]] = queue.SimpleQueue()

        def call() -> None:
            try:
                answers.put(([work(store)], None))
            except BaseException as error:
                answers.put(([], error))

        threading.Thread(target=call, name="hvdtrain-storage", daemon=True).start()
        try:
            results, error = answers.get(timeout=limit_s + LATE_S)
        except queue.Empty:
            raise StorageError(f"{what} took longer than {limit_s:.0f} s") from None
        if error is not None:
            raise error
        return results[0]

    def files(self) -> dict[str, int]:
        """Return sizes by name of all files, {} where nothing is stored; hidden ones are left out.

        fsspec's own find() returns nothing where a listing fails, which would start a run from scratch.
        """
        self.fs.invalidate_cache()
        found: dict[str, int] = {}
        folders = [self.root]
        while folders:
            folder = folders.pop()
            for one in self._call(f"listing {self.url}", partial(self._listed, folder)):
                path = str(one["name"]).rstrip("/")
                name = path[len(self.root) + 1:]
                if path == folder or not path.startswith(f"{self.root}/") or not is_plain(name):
                    continue
                if one["type"] == "directory":
                    folders.append(path)
                else:
                    found[name] = int(one["size"] or 0)
        return found

    def _listed(self, folder: str) -> list[dict[str, Any]]:
        try:
            return list(self.fs.ls(folder, detail=True))
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. FileNotFoundError."""
        return bytes(self._call(f"reading {name}", lambda: self.fs.cat_file(self._path(name))))

    def version(self, name: str) -> str:
        """Return a text that changes with the file, of its size and what the storage has of `VERSIONS`."""
        info = self._call(f"looking at {name}", lambda: self.fs.info(self._path(name)))
        return f"{info['size']} {next((f'{key} {info[key]}' for key in VERSIONS if info.get(key)), '')}".rstrip()

    def forget(self) -> None:
        """Ask the storage again, where fsspec remembers a listing."""
        self.fs.invalidate_cache()

    def get(self, name: str, path: Path) -> None:
        """Copy a file to ``path``, whose parent is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._call(f"reading {name}", lambda: self.fs.get_file(self._path(name), str(path)))
        except FileNotFoundError as error:
            raise StorageError(f"reading {name}: {_text(error)}") from None

    def put(self, path: Path, name: str) -> None:
        """Copy the file ``path``, which may grow meanwhile, and compare the sizes."""
        def copy() -> None:
            least = path.stat().st_size
            if not self._flat:
                self.fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(path), self._path(name))
            self.fs.invalidate_cache()
            stored = int(self.fs.info(self._path(name))["size"])
            if not least <= stored <= path.stat().st_size:
                raise StorageError(f"{stored} bytes are stored of {least}")

        try:
            self._call(f"writing {name}", copy)
        except FileNotFoundError as error:
            raise StorageError(f"writing {name}: {_text(error)}") from None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files one after the other; those that are missing count as removed."""
        for name in names:
            try:
                self._call(f"removing {name}", partial(self.fs.rm_file, self._path(name)))
            except FileNotFoundError:
                continue

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder where the storage has folders."""
        with contextlib.suppress(Exception):
            if not self._flat and time.monotonic() < self.ends_at:
                self.fs.rmdir(self._path(name))

    @property
    def _flat(self) -> bool:
        """Return whether folders are only prefixes of names, as in object stores, whose makedirs() makes buckets."""
        return bool(getattr(self.fs, "async_impl", False))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _call(self, what: str, work: Callable[[], T]) -> T:
        for wait_s in (*RETRY_WAITS_S, -1.0):
            if time.monotonic() >= self.ends_at:
                raise StorageError(f"{what}: the time for it is over")
            try:
                return work()
            except FileNotFoundError:
                raise
            except Exception as error:  # each storage has exceptions of its own
                if wait_s < 0 or isinstance(error, PermissionError):
                    raise StorageError(f"{what}: {_text(error)}") from None
            time.sleep(max(0.0, min(wait_s, self.ends_at - time.monotonic())))
        raise AssertionError("the last attempt returns or raises")


def is_plain(name: str) -> bool:
    """Return whether a stored name stays within its folder, and is not hidden."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(part.startswith((".", "/")) for part in parts)


def _text(error: BaseException) -> str:
    """Return an error of any package in one line, without credentials."""
    text = redacted(" ".join(str(error).split()))[:400]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
