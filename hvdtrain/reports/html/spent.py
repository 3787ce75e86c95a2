"""Where the ranks' seconds went: by cause, over time, and who waited for whom; from the records of a log.

Owns the sums. A log without "seconds" records (version 1) is read by what it has instead, and `Spent.basis` says so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.core.timeline.clock import CAUSES
from hvdtrain.reports.html.reading import Log
from hvdtrain.reports.html.words import number

USEFUL = ("compute", "update")
"""What trains; all else is what it takes to do so on these ranks."""

UNRECORDED = "the seconds between the last record and a kill, and the ends of processes"
"""What no record holds, in words."""

OF_METER = {"data_s": "input", "compute_s": "compute", "wait_s": "wait", "update_s": "update"}
OF_PHASES = {"data": "input", "compute": "compute", "wait": "wait", "update": "update"}


@dataclass
class Spent:
    """``ranks``: rank -> cause -> seconds; ``windows``: (unix seconds at its end, its seconds, cause -> seconds of all
    ranks, rank -> cause -> seconds); ``waits``: (who waited, for whom) -> seconds.

    ``basis``: "seconds": whole times by cause; "meter": mean steps only, waiting and wire in one; "phases": those of
    rank 0; "": nothing is known. ``sampled``: whether `waits` are known for a part of the waiting only.
    """

    ranks: dict[int, dict[str, float]] = field(default_factory=dict)
    windows: list[tuple[float, float, dict[str, float], dict[int, dict[str, float]]]] = field(default_factory=list)
    waits: dict[tuple[int, int], float] = field(default_factory=dict)
    basis: str = ""

    @property
    def total(self) -> dict[str, float]:
        """Seconds of all ranks by cause."""
        return summed(self.ranks.values())

    @property
    def all_s(self) -> float:
        """Seconds of all ranks and causes."""
        return math.fsum(self.total.values())

    def part(self, *causes: str) -> float:
        """Percent of all seconds that went to ``causes``; NaN without any."""
        total = self.total
        return 100.0 * sum(total.get(cause, 0.0) for cause in causes) / self.all_s if self.all_s > 0 else math.nan

    def after_start(self, *causes: str) -> float:
        """Percent of the seconds after the start that went to ``causes``; NaN without any."""
        total = self.total
        rest = self.all_s - total.get("start", 0.0)
        return 100.0 * sum(total.get(cause, 0.0) for cause in causes) / rest if rest > 0 else math.nan

    def held_up(self) -> dict[int, float]:
        """Seconds that the others waited for each rank, most first."""
        held: dict[int, float] = defaultdict(float)
        for (_, awaited), seconds in self.waits.items():
            held[awaited] += seconds
        return dict(sorted(held.items(), key=lambda item: -item[1]))


def add_up(log: Log) -> Spent:
    """Add up what a log tells of seconds."""
    spent = Spent()
    for event in log.all("seconds"):
        rows = by_rank(event.values.get("ranks"))
        for rank, row in rows.items():
            own = spent.ranks.setdefault(rank, dict.fromkeys(CAUSES, 0.0))
            for cause, seconds in row.items():
                own[cause] = own.get(cause, 0.0) + seconds
        spent.windows.append((event.time_s, number(event.values.get("window_s")), summed(rows.values()), rows))
        waits = event.values.get("waits")
        for row in waits if isinstance(waits, list) else ():
            if isinstance(row, list) and len(row) == 3 and all(number(one) >= 0 for one in row):
                pair = (int(number(row[0])), int(number(row[1])))
                if pair[0] != pair[1]:  # alike: it is not known for whom
                    spent.waits[pair] = spent.waits.get(pair, 0.0) + number(row[2])
    if spent.ranks:
        spent.basis = "seconds"
    else:
        _of_older(spent, log)
    return spent


def by_rank(rows: Any) -> dict[int, dict[str, float]]:
    """Read "by rank, cause -> seconds" as a list or as a mapping; what is no number counts as 0."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(rows, list):
        pairs = enumerate(rows)
    elif isinstance(rows, dict):
        pairs = ((int(key), row) for key, row in rows.items() if str(key).isdigit())
    return {rank: {str(name): max(0.0, number(value)) for name, value in row.items() if number(value) >= 0}
            for rank, row in pairs if isinstance(row, dict)}


def summed(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add rows by cause, in the causes' order."""
    total = dict.fromkeys(CAUSES, 0.0)
    for row in rows:
        for cause, seconds in row.items():
            total[cause] = total.get(cause, 0.0) + seconds
    return total


def _of_older(spent: Spent, log: Log) -> None:
    """Read the meter's mean step, else rank 0's phases."""
    meter = log.last("meter")
    rows = by_rank(meter.get("ranks"))
    if rows:
        spent.basis = "meter"
        spent.ranks = {
            rank: {cause: row.get(key, 0.0) for key, cause in OF_METER.items()} for rank, row in rows.items()
        }
    elif log.last_phases:
        spent.basis = "phases"
        phases = by_rank([log.last_phases]).get(0, {})
        spent.ranks = {0: {cause: phases.get(key, 0.0) for key, cause in OF_PHASES.items()}}
