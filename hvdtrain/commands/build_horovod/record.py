"""Record of the Horovod installed here: share/hvdtrain/horovod-build.json of the environment. Never imports Horovod."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class BuildRecord:
    """``key`` of the plan, ``wheel_sha256``, and the names of the checks it passed in ``verified``.

    ``frameworks``: version by distribution. ``mpi``: "flavour version", or "" for Gloo alone.
    """

    key: str
    wheel_sha256: str
    horovod: str
    python: str
    frameworks: dict[str, str]
    mpi: str
    cuda: bool
    verified: list[str] = field(default_factory=list)


def path() -> Path:
    return Path(sys.prefix, "share", "hvdtrain", "horovod-build.json")


def write(record: BuildRecord) -> None:
    path().parent.mkdir(parents=True, exist_ok=True)
    aside = path().with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(asdict(record), indent=2) + "\n")
    os.replace(aside, path())


def read() -> BuildRecord | None:
    """Return the record, or None where there is none or it cannot be read."""
    try:
        return BuildRecord(**json.loads(path().read_text()))
    except (OSError, ValueError, TypeError):
        return None


def installed() -> BuildRecord | None:
    """Return the record of the Horovod installed here; None without Horovod, or with one that this tool did not
    install.
    """
    record = read()
    if record is None:
        return None
    try:
        dist = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    return record if record.wheel_sha256 == _source_sha256(dist) else None


def _source_sha256(dist: importlib.metadata.Distribution) -> str:
    """Return the digest of the wheel that pip installed ``dist`` from, "" where pip noted none."""
    try:
        archive = json.loads(dist.read_text("direct_url.json") or "{}").get("archive_info", {})
    except ValueError:
        return ""
    return str(archive.get("hashes", {}).get("sha256", "") or archive.get("hash", "").removeprefix("sha256="))
