"""Hand every record of a run to the reports whose turn it is: callbacks write here, reports read.

Knows no report. A report that fails is noted once and dropped: none ends a run.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Record, RecordedRun, Report

MOST_HELD = 1000
"""Records kept until the run begins; beyond these the oldest are lost."""

checks: list[Callable[[Record], None]] = []
"""Called with every record, before any report; tests hold them against the schema here."""


class RecordStream:
    """Gives records to the reports that ``make`` returns, in the order in which they were made.

    On rank 0; elsewhere it makes none. ``latest``: the last record of each event.
    """

    def __init__(self, make: Callable[[], Sequence[Report]] = list) -> None:
        self.latest: dict[str, Record] = {}
        self._make = make
        self._reports: list[tuple[Report, Turns]] = []
        self._held: deque[Record] = deque(maxlen=MOST_HELD)
        self._also: list[Report] = []

    def also(self, report: Report) -> None:
        """Give the records of the next fit to ``report`` too."""
        self._also.append(report)

    def open(self) -> None:
        """Make the reports, where they are not open: they have all records from now on. A fit begins with it."""
        if not self._reports:
            self._reports = [(report, Turns(report.every, f"{type(report).__name__}.every is {report.every!r}"))
                             for report in [*self._make(), *self._also]]

    def wanted(self, run: RecordedRun) -> bool:
        """Return whether the "step" record of the step that has just ended is any report's turn; ask once a step."""
        due = False
        for _, turns in self._reports:
            due = turns.ask(run) or due
        return due

    def write(self, run: RecordedRun, event: str, values: dict[str, Any]) -> None:
        """Make a record and hand it on."""
        record = Record(event, run.state.cursor.step, time.time(), values)
        for check in checks:
            check(record)
        self.latest[event] = record
        if not self._reports:
            return
        self.flush(run)
        if not run.begun:
            self._held.append(record)
        for report, turns in list(self._reports):
            if (event != "step" or turns.due) and (run.begun or report.at_once):
                self._give(run, report, record)

    def flush(self, run: RecordedRun) -> None:
        """Hand over what has waited for the run to begin, if it has."""
        while run.begun and self._held:
            record = self._held.popleft()
            for report, _ in list(self._reports):
                if not report.at_once:
                    self._give(run, report, record)

    def close(self, run: RecordedRun) -> None:
        """End every report; what has waited for a run that did not begin is forgotten."""
        self.flush(run)
        self._held.clear()
        reports, self._reports, self._also = self._reports, [], []
        for report, _ in reports:
            try:
                report.close()
            except Exception as error:  # noqa: BLE001  (whatever a tracker's library raises)
                self._failed(run, report, error)

    def _give(self, run: RecordedRun, report: Report, record: Record) -> None:
        if all(other is not report for other, _ in self._reports):
            return  # it failed over the note that another has failed, and that was said
        try:
            report.write(record)
        except Exception as error:  # noqa: BLE001  (whatever a tracker's library raises)
            self._reports = [(other, turns) for other, turns in self._reports if other is not report]
            self._failed(run, report, error)

    @staticmethod
    def _failed(run: RecordedRun, report: Report, error: Exception) -> None:
        name = getattr(report, "name", type(report).__name__)
        run.note(f"{name} fails ({type(error).__name__}: {error}); training goes on without it")


class Turns:
    """Says at which steps it is somebody's turn who wants ``every``: "50 step", "2 epoch", "5 s", "" each.

    ``got``: what a `UserError` says of an ``every`` that means nothing. ``clock``: seconds may be meant, as on rank 0
    alone, since clocks differ. ``due``: what `ask` has returned last.
    """

    def __init__(self, every: str, got: str, clock: bool = True) -> None:
        self.due = True
        self._last = -math.inf
        count, _, self._unit = every.partition(" ")
        if every and (not re.fullmatch(r"\d+(\.\d+)?" if self._unit == "s" else r"\d+", count) or float(count) == 0
                      or self._unit not in ("step", "epoch", *(["s"] if clock else []))):
            raise UserError(got, "'N step', 'N epoch', or, on root only, 'N s'",
                            "correct it")
        self._count = float(count or 0)

    def ask(self, run: RecordedRun) -> bool:
        """Return whether it is its turn after the step that has just ended; ask once a step."""
        if self._unit == "step":
            self.due = run.state.cursor.step % int(self._count) == 0
        elif self._unit == "epoch":
            left = run.feed.steps_left(run.state.cursor)
            self.due = left == 0 and (run.state.cursor.epoch + 1) % int(self._count) == 0
        elif self._unit == "s":
            now = time.monotonic()
            self.due = now - self._last >= self._count
            self._last = now if self.due else self._last
        return self.due
