"""Prometheus: the last numbers as text in ``metrics.prom`` of the run's directory; hvdtrain_running is 0 after the end.

``prometheus:FILE.prom`` writes another file, as for node exporter's textfile collector; each is replaced whole.
``prometheus:PORT`` answers at /metrics on that port of the loopback address instead.
"""

from __future__ import annotations

from pathlib import Path

from hvdtrain.core.protocols import Record, RecordedRun
from hvdtrain.core.records.numbers import numbers, settings
from hvdtrain.reports.gauges import Gauges, Server

MODULE = PACKAGE = ""
PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"  # 1 to 65535
ARGUMENT, MEANS = rf"|{PORT}|.+\.prom", ", prometheus:PORT or prometheus:FILE.prom"
APART_S = 1.0  # a step costs 150 us of CPU and 600 us with the disk


class Prometheus:
    """Keeps the last value of each number, the ranks' under the label rank."""

    def __init__(self, run: RecordedRun, argument: str) -> None:
        self._gauges, self._text = Gauges(run=run.out.name), ""
        self._path = Path(argument or run.out / "metrics.prom")
        self._server = Server(int(argument), lambda: self._text) if argument.isdigit() else None

    def write(self, record: Record) -> None:
        """Take over the record's numbers, and its settings as labels of a 1."""
        if found := settings(record):
            self._gauges.set(f"settings_{record.event}", 1, **found)
        for name, value in numbers(record).items():
            metric, _, rank = name.partition("/rank")
            self._gauges.set(metric, value, **({"rank": rank} if rank else {}))
        self._publish(running=1, step=record.step, last_record_unix_s=record.time_s)

    def _publish(self, **values: float) -> None:
        for name, value in values.items():
            self._gauges.set(name, value)
        self._text = self._gauges.text()
        if self._server is None:
            beside = self._path.with_name(f".{self._path.name}.new")  # the collector reads what ends in .prom
            beside.write_text(self._text, encoding="utf-8")
            beside.replace(self._path)

    def close(self) -> None:
        """Say that the run is over, in the file; a port answers no more."""
        self._publish(running=0)
        if self._server is not None:
            self._server.stop()
