"""What a probe measured, remembered between runs: one small JSON file per model, device and versions.

Owns the files in $XDG_CACHE_HOME/hvdtrain/probe. A file that is missing, damaged or not writable is no error: the probe
measures again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

from hvdtrain.balance.line import Line
from hvdtrain.balance.speed import Speed

LARGEST = 65536
"""Bytes of a file that is read at all."""


def key(run: Any) -> str:
    """A checksum of what a time depends on: parameters, samples, device, versions, threads, neighbours, precision."""
    config, rank = run.config, run.control.rank
    host = run.topology.host_of(rank)
    sample = [(str(a.dtype), a.shape[1:]) for a in run.feed.sample(1)]
    names = ["hvdtrain", "numpy", *{"torch": ["torch"], "tensorflow": ["tensorflow-cpu", "tensorflow", "keras"]}.get(
        run.spec.framework, [])]
    facts = [run.spec.framework, run.spec.name, config.model_args, [(p.name, p.shape, p.dtype) for p in
             run.step.params()], sample, vars(run.devices[rank]) | {"memory_bytes": 0}, [_version(n) for n in names],
             config.threads, host.cores, len(host.ranks), run.step.precision.own, config.sync_batchnorm,
             config.global_batch, run.control.size, config.micro_batch, config.emulate_speed, config.deterministic]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def load(name: str) -> Speed | None:
    """The speed kept under ``name``, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        path = _folder() / f"{name}.json"
        if path.stat().st_size > LARGEST:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        sizes, seconds = tuple(found["sizes"]), tuple(found["seconds"])
        line = Line(float(found["a_s"]), float(found["c_s"]))
        ceiling = found["ceiling"]
        whole = all(type(b) is int and b > 0 for b in sizes) and type(ceiling) is int and ceiling >= 0
        timed = len(sizes) == len(seconds) > 0 and all(0 < t < 1e6 for t in seconds)
        if whole and timed and math.isfinite(line.a_s) and 0 < line.c_s < 1e6 and line.a_s >= 0:
            return Speed(line, ceiling, sizes, seconds)
    return None


def save(name: str, speed: Speed) -> None:
    """Keep ``speed`` under ``name``; the file appears whole or not at all."""
    record = {"a_s": speed.line.a_s, "c_s": speed.line.c_s, "ceiling": speed.ceiling, "sizes": list(speed.sizes),
              "seconds": list(speed.seconds)}
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
