"""Figures of `benchmarks mixed` made of its times: parts of the sum of solo speeds, before and after speeds change.

Owns these numbers and their tables. Pure: measures and prints nothing. Everything is by round, and what is told is the
median over rounds, since solo speeds are measured again in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import standings
from benchmarks.standings import Times, shown

HEADERS = ("contender", "wire", "ms a step", "samples/s", "% of solo sum", "min", "max", "x hvdtrain",
           "samples by rank")
TARGET_PERCENT = 90.0
WINDOW = 5
"""Steps that the speed after a change is taken over."""


def solo(speed: float) -> str:
    """Name of the job that runs alone at ``speed``."""
    return f"solo {speed:g}"


@dataclass(frozen=True)
class Measured:
    """All that was timed; every list has one entry a round, the same rounds for all.

    ``batch``: samples of a rank, as a solo job takes them in a step; a contender takes ``batch * len(speeds)``.
    ``times``: contenders and solo jobs. ``samples``: of each rank in the last step of a round. ``moved``: seconds of
    each step after the change. ``emulated``: only the solo job at speed 1 was run.
    """

    speeds: tuple[float, ...]
    batch: int
    times: Times
    samples: Mapping[str, Sequence[Sequence[int]]]
    moved: Mapping[str, Sequence[Sequence[float]]]
    emulated: bool = False

    @property
    def contenders(self) -> list[str]:
        """The names that are no solo jobs."""
        alone = {solo(speed) for speed in (*self.speeds, 1.0)}
        return [name for name in self.times if name not in alone]

    def solo_sums(self) -> list[float] | None:
        """Return samples a second of all ranks alone, added up; by round. None where one was not measured."""
        found = [self._solo_rates(speed) for speed in self.speeds]
        return None if None in found else [sum(rates) for rates in zip(*found)]  # type: ignore[arg-type]

    def _solo_rates(self, speed: float) -> list[float] | None:
        ms = self.times.get(solo(1.0 if self.emulated else speed))
        return None if ms is None else [1e3 * self.batch / t * (speed if self.emulated else 1.0) for t in ms]

    def rates(self, name: str) -> list[float]:
        """Return samples a second of a contender or a solo job, by round."""
        step = self.batch * (len(self.speeds) if name in self.contenders else 1)
        return [1e3 * step / ms for ms in self.times[name]]

    def percents(self, name: str) -> list[float] | None:
        """Return a contender's speed as part of the sum of solo speeds, by round."""
        sums = self.solo_sums()
        return None if sums is None else [100 * rate / total for rate, total in zip(self.rates(name), sums)]

    def windows(self, name: str) -> list[list[float]] | None:
        """Return the same of each whole window of `WINDOW` steps after the change: [round][window]."""
        sums = self.solo_sums()
        if sums is None or name not in self.moved:
            return None
        samples = self.batch * len(self.speeds) * WINDOW
        return [[100 * samples / sum(step_s[at:at + WINDOW]) / total
                 for at in range(0, len(step_s) - WINDOW + 1, WINDOW)]
                for step_s, total in zip(self.moved[name], sums)]

    def recovery(self, name: str) -> tuple[list[float], int | None] | None:
        """(median % of each window after the change, steps before the first that reaches the target; None: none)."""
        by_round = self.windows(name)
        if not by_round:
            return None
        middle = [median(values) for values in zip(*by_round)]
        first = next((at for at, percent in enumerate(middle) if percent >= TARGET_PERCENT), None)
        return middle, None if first is None else first * WINDOW


def summary(measured: Measured) -> dict[str, dict[str, Any]]:
    """Of each contender and solo job: what the tables show and the last record keeps; None for what is not known."""
    found: dict[str, dict[str, Any]] = {}
    for name, ms in measured.times.items():
        own = name in measured.contenders
        percents = measured.percents(name) if own else None
        recovery = measured.recovery(name) if own else None
        found[name] = {
            "median_ms": median(ms), "samples_per_s": median(measured.rates(name)),
            "percent": percents and median(percents), "percent_min": percents and min(percents),
            "percent_max": percents and max(percents),
            "to_hvdtrain": standings.ratio(measured.times, name, standings.base(measured.times)) if own else None,
            "samples": list(measured.samples[name][-1]) if measured.samples.get(name) else None,
            "windows_percent": recovery and recovery[0], "steps_to_target": recovery and recovery[1]}
    return found


def rows(found: Mapping[str, Mapping[str, Any]], wires: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the table's rows, under `HEADERS`."""
    return [(name, wires[name], f"{s['median_ms']:.1f}", f"{s['samples_per_s']:.1f}",
             *(shown(s[key], 1) for key in ("percent", "percent_min", "percent_max")), shown(s["to_hvdtrain"]),
             ":".join(map(str, s["samples"] or ["-"]))) for name, s in found.items()]


def change_headers(found: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Of the table of what follows the change."""
    windows = max(len(s["windows_percent"] or ()) for s in found.values())
    return ("contender", "before", *(f"{n * WINDOW + 1}-{(n + 1) * WINDOW}" for n in range(windows)),
            f"steps to {TARGET_PERCENT:g} %")


def change_rows(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows under `change_headers`, of those that were there when the speeds changed."""
    return [(name, shown(s["percent"], 1), *(f"{p:.1f}" for p in s["windows_percent"]),
             "not reached" if s["steps_to_target"] is None else str(s["steps_to_target"]))
            for name, s in found.items() if s["windows_percent"]]
