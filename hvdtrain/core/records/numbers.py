"""Reads numbers and settings out of records, by name: what trackers draw as curves and show as hyperparameters.

Owns the names: "train/loss", "test/accuracy", "system/rss_bytes/rank0". Knows no tracker.
"""

from __future__ import annotations

import contextlib
import numbers as kinds
from collections.abc import Iterator
from typing import Any

from hvdtrain.core.protocols import Record
from hvdtrain.core.records import EVENTS

GROUPS = {"step": "train", "eval": "test", "system": "system", "seconds": "percent_of_time", "saved": "checkpoint",
          "meter": "meter"}
"""Events of the house with numbers that change while a run goes on -> the first part of their names."""

LEFT_OUT = {"step": ("samples", "phases_s"), "eval": ("samples_per_s",), "seconds": ("from_step", "window_s", "waits"),
            "saved": ("at_step",)}
"""Event -> values that are a position, a sum since the start, or told by another event."""


def numbers(record: Record) -> dict[str, float]:
    """Return the record's numbers by name, null ones left out; {} for an event that has none to draw.

    A value of each rank ends in "/rank0", "/rank1" and so on. Seconds by cause become percent of the rank's time. An
    event of a user's own (`Run.record`) has its numbers under its own name.
    """
    group = GROUPS.get(record.event) or ("" if record.event in EVENTS else record.event)
    if not group:
        return {}
    values = {name: value for name, value in record.values.items() if name not in LEFT_OUT.get(record.event, ())}
    if record.event == "eval":
        values.update(values.pop("metrics", {}))
    if record.event == "seconds":
        values["ranks"] = [_percent(causes) for causes in values.get("ranks", ())]
    return {f"{group}/{name}": value for name, value in _flat(values)}


def settings(record: Record) -> dict[str, bool | int | float | str]:
    """Return what a "start" or "environment" record says of the run, by dotted name: configuration, ranks, versions.

    {} for other events. Lists and what else has no simple type become text.
    """
    if record.event == "start":
        world = {name: record.values.get(name) for name in ("world_size", "hosts", "framework", "wire")}
        return dict(_plain({**record.values.get("config", {}), **world}))
    if record.event == "environment":
        told_by_start = ("differs", "hosts")
        return dict(_plain({name: value for name, value in record.values.items() if name not in told_by_start}))
    return {}


def _percent(causes: dict[str, float]) -> dict[str, float]:
    whole_s = sum(causes.values())
    return {cause: 100.0 * seconds / whole_s for cause, seconds in causes.items()} if whole_s > 0 else {}


def _flat(values: dict[str, Any], rank: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of nested values; entries of a list are the ranks'."""
    for name, value in values.items():
        if isinstance(value, kinds.Real) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # a whole number beyond any float is no curve's
                yield f"{name}{rank}", float(value)
        elif isinstance(value, dict):
            yield from ((f"{name}/{inner}", number) for inner, number in _flat(value, rank))
        elif isinstance(value, (list, tuple)) and not rank:
            for r, own in enumerate(value):
                ranked = own if name == "ranks" and isinstance(own, dict) else {name: own}
                yield from _flat(ranked, f"/rank{r}")


def _plain(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _plain(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, (bool, int, float, str)) else str(value)
