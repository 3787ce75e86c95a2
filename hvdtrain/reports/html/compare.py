"""Report of several runs side by side: results, curves, time breakdown, configuration differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.core.records import flat
from hvdtrain.reports.html import headline, story
from hvdtrain.reports.html.curves import Chart, Series, chart
from hvdtrain.reports.html.facts import RunFacts, words_of
from hvdtrain.reports.html.headline import Ending
from hvdtrain.reports.html.sections.learning import evaluations, standing
from hvdtrain.reports.html.sections.seconds import DRAWN, MEANING
from hvdtrain.reports.html.shapes import Bars, Charts, Section, Table, bar
from hvdtrain.reports.html.story import Answer
from hvdtrain.reports.html.words import count, duration, listed, percent, short

MOST = 8
"""Runs that are drawn."""


@dataclass(frozen=True)
class Side:
    """Column of one run."""

    name: str
    color: str
    end: Ending
    head: list[str]
    story: list[Answer]


@dataclass(frozen=True)
class Compared:
    """Page of several runs."""

    headline: str
    sides: list[Side]
    sections: list[Section]


def compare(runs: Sequence[RunFacts]) -> Compared:
    """Put ``runs`` side by side; beyond `MOST` the rest is left out, which the headline says."""
    shown = list(runs[:MOST])
    names = _names(shown)
    sides = [Side(name, f"k{i % 8}", headline.verdict(one), headline.title_parts(one), story.tell(one))
             for i, (name, one) in enumerate(zip(names, shown))]
    found = [_numbers(shown, names), _curves(shown, names), _seconds(shown, names), _settings(shown, names)]
    left = f"; {count(len(runs) - MOST, 'run')} more are not shown" if len(runs) > MOST else ""
    return Compared(_sentence(shown, names) + left, sides, [one for one in found if one is not None])


def _names(runs: Sequence[RunFacts]) -> list[str]:
    """Return short names that differ: a directory's name, with its parents' as far as it takes."""
    for parts in range(1, 4):
        names = ["/".join(one.path.parts[-parts:]) for one in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{one.name} ({i + 1})" for i, one in enumerate(runs)]


def _speed(facts: RunFacts) -> float:
    """Return samples a second, the mean over the second half of the recorded steps; NaN: not known."""
    _, values = standing(facts, "samples_per_s")
    late = [value for value in values[len(values) // 2:] if value == value]
    return sum(late) / len(late) if late else math.nan


def _sentence(runs: Sequence[RunFacts], names: Sequence[str]) -> str:
    speeds = [_speed(one) for one in runs]
    known = [i for i, speed in enumerate(speeds) if speed > 0]
    same = len({(one.start.get("model"), words_of(one.config.get("data"))) for one in runs}) == 1
    if len(known) < 2 or not same:
        return f"{listed(names)}, side by side"
    best, worst = max(known, key=lambda i: speeds[i]), min(known, key=lambda i: speeds[i])
    ratio = speeds[best] / speeds[worst]
    if ratio < 1.02:
        return f"{listed(names)} are equally fast"
    return f"{names[best]} is {ratio:.3g} times as fast as {names[worst]}"


def _numbers(runs: Sequence[RunFacts], names: Sequence[str]) -> Section:
    tiles = [{tile.name: tile.value for tile in headline.tiles(one)} for one in runs]
    for row, one in zip(tiles, runs):
        row["speed, second half"] = f"{short(_speed(one))} samples/s"
    keys = list(dict.fromkeys(key for row in tiles for key in row))
    rows = [[key, *(row.get(key, "") for row in tiles)] for key in keys]
    return Section("numbers", "Numbers", "", [Table("", ["", *names], rows)])


def _curves(runs: Sequence[RunFacts], names: Sequence[str]) -> Section | None:
    charts: list[Chart | None] = []
    for column, title, unit, zero in (
        ("loss", "Training loss", "", False),
        ("samples_per_s", "Speed", "samples/s", True),
    ):
        lines = [Series(name, *standing(one, column), f"k{i % 8}") for i, (name, one) in enumerate(zip(names, runs))]
        charts.append(chart(title, unit, lines, zero=zero))
    tests = [evaluations(one) for one in runs]
    for metric in list(dict.fromkeys(key for row in tests for key in row))[:6]:
        lines = [Series(name, *row[metric], f"k{i % 8}", dots=True) for i, (name, row) in enumerate(zip(names, tests))
                 if metric in row]
        charts.append(chart(f"Test {metric}", "", lines))
    drawn = [one for one in charts if one is not None]
    return Section("curves", "Learning", "Over steps.", [Charts(drawn)]) if drawn else None


def _seconds(runs: Sequence[RunFacts], names: Sequence[str]) -> Section | None:
    """Return all ranks' time by cause, in percent of each run's."""
    rows, used = [], set()
    for name, one in zip(names, runs):
        if one.spent.basis == "seconds" and one.spent.all_s > 0:
            parts = {cause: one.spent.part(cause) for cause in DRAWN}
            used |= {cause for cause, part in parts.items() if part > 0}
            words = {cause: f"{name}: {cause} {percent(part, 1)}" for cause, part in parts.items()}
            rows.append(bar(name, parts, 100.0, words, duration(one.spent.all_s)))
    if not rows:
        return None
    legend = [(f"c-{cause}", f"{cause}: {MEANING[cause]}", "") for cause in DRAWN if cause in used]
    return Section("seconds", "Time breakdown", "Time of all ranks by cause, in percent; on the right the total.",
                   [Bars("", rows, legend)])


def _settings(runs: Sequence[RunFacts], names: Sequence[str]) -> Section:
    configs = [flat(one.config) for one in runs]
    keys = sorted({key for config in configs for key in config})
    rows = [[key, *("" if key not in config else words_of(config[key]) for config in configs)] for key in keys
            if key != "out" and len({words_of(config.get(key)) for config in configs}) > 1]
    lead = f"{count(len(rows), 'key')} {'differs' if len(rows) == 1 else 'differ'}." if rows else "No key differs."
    blocks = [Table("", ["key", *names], rows, words=frozenset(range(1, len(names) + 1)))] if rows else []
    return Section("configuration", "Configuration differences", lead, blocks)
