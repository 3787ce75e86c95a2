"""File of calibrations: kept by device kind and workload, read strictly, corrected by later runs.

Owns the file's format. Measuring is left to `hvdtrain.engine.calibration`.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from hvdtrain.core import whole_file
from hvdtrain.engine import balance_probe, step_history
from hvdtrain.engine.step_history import StepRow
from hvdtrain.planning.compressor_choice import CodecCost
from hvdtrain.planning.hardware.rates import MOST_ERROR, Calibration, ZeroUpdate
from hvdtrain.planning.linear import LinearTime, Link

VERSION = 3
"""Of the file's format; others are not read."""

LARGEST, MOST_ENTRIES = 1 << 20, 64
"""Bytes of a file that is read, and calibrations that it keeps, the latest ones."""

MOST_FACTOR = 4.0
"""Runs correct a calibration by so much at most: what differs more was another setting."""


def keep(found: Calibration, workload: str) -> None:
    """Keep a calibration of the workload with the checksum ``workload``; the file appears whole or not at all."""
    with contextlib.suppress(OSError):
        folder = balance_probe.cache_folder("calibration")
        folder.mkdir(parents=True, exist_ok=True)
        rows = [row for row in _rows(found.device) if _identity(row) != _identity(_row(found, workload))]
        record = {"version": VERSION, "device": found.device,
                  "calibrations": [*rows, _row(found, workload)][-MOST_ENTRIES:]}
        with whole_file(folder / f"{_slug(found.device)}.json") as draft:
            draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def known(device: str, workload: str) -> list[Calibration]:
    """Return the calibrations of ``device`` that are kept of a workload, the oldest first, corrected by later runs."""
    found = []
    for row in _rows(device):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):  # int(Infinity)
            if row["workload"] == workload:
                found.append(corrected(made := _read(device, row), runs_of(made)))
    return found


def runs_of(found: Calibration) -> list[StepRow]:
    """Return what runs took since in the setting of a calibration, on this host; the oldest first."""
    return step_history.steps(found.history) if found.history else []


def corrected(found: Calibration, rows: Sequence[StepRow]) -> Calibration:
    """Return the calibration by what whole runs of the model on this device took since; ``rows``: oldest first. Pure.

    The line is scaled to the latest run whose micro-batches it covers, and its error is the largest of the forecasts
    of these runs.
    """
    covered = [row for row in rows if row.micros > 0 and row.compute_s > 0 and found.covers(
        round(row.samples / row.micros))]
    if not covered:
        return found
    row = covered[-1]
    factor = (row.compute_s - (row.micros - 1) * found.accumulate_s) / (
        row.micros * found.line.a_s + row.samples * found.line.c_s)
    factor = min(MOST_FACTOR, max(1 / MOST_FACTOR, factor))
    errors = [abs(one.error) for one in covered if math.isfinite(one.error)]
    return replace(found, line=found.line.scaled(factor), update_s=row.update_s,
                   error=min(MOST_ERROR, max([found.error, *errors])))


def _row(found: Calibration, workload: str) -> dict[str, Any]:
    def link(one: Link | None) -> list[float] | None:
        return None if one is None else [one.alpha_s, one.beta_s_per_byte]

    return {"workload": workload, "precision": found.precision, "local": found.local, "hosts": found.hosts,
            "line": [found.line.a_s, found.line.c_s], "sizes": list(found.sizes), "update_s": found.update_s,
            "fixed_s": found.fixed_s, "error": found.error, "transport": found.transport, "overlaps": found.overlaps,
            "within": link(found.within), "between": link(found.between),
            "codecs": {name: list(astuple(codec)) for name, codec in found.codecs.items()},
            "save_s": list(found.save_s), "late": found.late, "accumulate_s": found.accumulate_s,
            "zero": None if found.zero is None else list(astuple(found.zero)), "history": found.history,
            "when": found.when}


def _read(device: str, row: dict[str, Any]) -> Calibration:
    """Return a row as a calibration; ValueError for numbers that none has."""
    def link(pair: Sequence[float] | None) -> Link | None:
        return None if pair is None else Link(*_numbers(pair))

    a_s, c_s = _numbers(row["line"])
    update_s, fixed_s = _numbers([row["update_s"], row["fixed_s"]])
    error, late = _numbers([row["error"], row["late"]])
    accumulate_s, _ = _numbers([row["accumulate_s"], 0.0])
    sizes = tuple(int(size) for size in row["sizes"])
    if c_s <= 0 or not sizes or min(sizes) < 1 or max(error, late) > 1:
        raise ValueError(row)
    codecs = {str(name): CodecCost(*_numbers([codec_s, ratio]), _numbers([later_s, 0.0])[0],
                                   tuple(int(n) for n in nbytes))
              for name, (codec_s, ratio, later_s, nbytes) in row["codecs"].items()}
    if min((n for codec in codecs.values() for n in codec.bucket_bytes), default=0) < 0:
        raise ValueError(row)
    zero = None
    if row["zero"] is not None:
        ranks, shard_s, copy_s, overlaps = row["zero"]
        zero = ZeroUpdate(max(1, int(ranks)), *_numbers([shard_s, copy_s]), bool(overlaps))
    return Calibration(device, str(row["precision"]), int(row["local"]), int(row["hosts"]), LinearTime(a_s, c_s),
                       sizes, update_s, error, str(row["transport"]), bool(row["overlaps"]), link(row["within"]),
                       link(row["between"]), codecs, _numbers(row["save_s"]), fixed_s, late, accumulate_s, zero,
                       str(row["history"]), str(row["when"]))


def _numbers(values: Sequence[Any]) -> tuple[float, float]:
    """Return two numbers; ValueError for others."""
    first, second = (float(value) for value in values)
    if not (0 <= first < 1e9 and 0 <= second < 1e9):
        raise ValueError(values)
    return first, second


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("workload", "precision", "local", "hosts", "transport"))


def _rows(device: str) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        path = balance_probe.cache_folder("calibration") / f"{_slug(device)}.json"
        if path.stat().st_size <= LARGEST:
            found = json.loads(path.read_text(encoding="utf-8"))
            if (found["version"], found["device"]) == (VERSION, device):  # names may share a file's name
                return [row for row in found["calibrations"] if isinstance(row, dict)]
    return []


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-.")[:80] or "device"
