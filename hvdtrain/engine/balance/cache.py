"""What a probe measured, remembered between runs: one small JSON file per model, device and versions.

Owns the files in $XDG_CACHE_HOME/hvdtrain/probe. A file that is missing, damaged or not writable is no error: the probe
measures again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.engine.run import Run

LARGEST = 65536
"""Bytes of a file that is read at all."""

MORE_ROOM = 0.05
"""Part by which a rank's room may have grown without its old ceiling being forgotten."""


def key(run: Run, sample: Any) -> str:
    """A checksum of what a time depends on: model, samples, device and its place, versions, threads, precision.

    ``sample``: arrays (1, ...).
    """
    config, rank = run.config, run.control.rank
    host = run.topology.host_of(rank)
    names = ["hvdtrain", "numpy", *{"torch": ["torch"], "tensorflow": ["tensorflow-cpu", "tensorflow", "keras"]}.get(
        run.spec.framework, [])]
    facts = [run.spec.framework, run.spec.name, config.model_args, [(p.name, p.shape, p.dtype) for p in
             run.parts.params.specs], [(str(a.dtype), a.shape[1:]) for a in sample], vars(run.devices[rank]) |
             {"memory_bytes": 0}, host.node, host.ranks.index(rank), host.cores, len(host.ranks),
             [_version(n) for n in names], config.threads, run.parts.precision.own, config.sync_batchnorm,
             config.deterministic, config.emulate_speed[rank] if config.emulate_speed else 1.0]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def load(name: str) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    """(sizes, seconds of a micro-batch of each) kept under ``name``, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, ArithmeticError):
        path = _folder() / f"{name}.json"
        if path.stat().st_size > LARGEST:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        sizes, seconds = tuple(found["sizes"]), tuple(float(t) for t in found["seconds"])
        whole = all(type(b) is int and b > 0 for b in sizes)
        if whole and len(sizes) == len(seconds) > 0 and all(0 < t < 1e6 for t in seconds):
            return sizes, seconds
    return None


def save(name: str, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    """Keep the times under ``name``; the file appears whole or not at all."""
    _write(name, {"sizes": list(sizes), "seconds": list(seconds)})


def ceiling(name: str, holds: str, room_bytes: int) -> int:
    """Return the largest micro-batch since an earlier run ran out of memory; 0 where none did, or in vain.

    ``holds``: what the run is made of that takes memory, in words. ``room_bytes``: what this rank may hold; where that
    is more than it was then, the micro-batch may be larger too.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        path = _folder() / f"{name}-memory.json"
        if path.stat().st_size <= LARGEST:
            found = json.loads(path.read_text(encoding="utf-8"))
            samples, room = found["micro_batch"], found["room_bytes"]
            alike = found["holds"] == holds and type(samples) is int and samples > 0
            return samples if alike and room_bytes <= (1 + MORE_ROOM) * room else 0
    return 0


def save_ceiling(name: str, holds: str, room_bytes: int, micro_batch: int) -> None:
    """Keep what `ceiling` tells later runs."""
    _write(f"{name}-memory", {"micro_batch": micro_batch, "holds": holds, "room_bytes": room_bytes})


def _write(name: str, record: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{name}.{secrets.token_hex(4)}"
        draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
        os.replace(draft, folder / f"{name}.json")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "hvdtrain", "probe")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
