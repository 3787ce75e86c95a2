"""Prometheus: the last numbers as text in ``metrics.prom`` of the run's directory; hvdtrain_running is 0 after the end.

``prometheus:FILE.prom`` writes another file, as for node exporter's textfile collector.
``prometheus:PORT`` answers at /metrics on that port of the loopback address instead.
"""

from __future__ import annotations

import re
from typing import Any

from hvdtrain.core.protocols import Record, RecordedRun
from hvdtrain.core.records import numbers, settings

MODULE, PACKAGE = "prometheus_client", "prometheus-client"
PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"  # 1 to 65535
ARGUMENT, MEANS = rf"|{PORT}|.+\.prom", ", prometheus:PORT or prometheus:FILE.prom"
APART_S = 1.0  # a step costs up to 1 ms with the disk
HOST = "127.0.0.1"


class Prometheus:
    """Keeps the last value of each number, the ranks' under the label rank; a collector of prometheus_client."""

    def __init__(self, run: RecordedRun, argument: str) -> None:
        import prometheus_client

        self._client, self._registry = prometheus_client, prometheus_client.CollectorRegistry()
        self._run, self._path = run.out.name, argument or str(run.out / "metrics.prom")
        self._metrics: dict[str, Any] = {}  # no Gauge: labels differ within a name
        self._registry.register(self)
        self._server = self._client.start_http_server(int(argument), HOST, self._registry) if argument.isdigit() else ()

    def collect(self) -> list[Any]:
        return list(self._metrics.values())

    def write(self, record: Record) -> None:
        if found := settings(record):
            self._set(f"settings_{record.event}", 1, **found)
        for name, value in numbers(record).items():
            of_rank = re.fullmatch(r"(.*)/rank(\d+)", name)  # an evaluation set may be called "ranking"
            self._set(of_rank[1] if of_rank else name, value, **({"rank": of_rank[2]} if of_rank else {}))
        self._publish(running=1, step=record.step, last_record_unix_s=record.time_s)

    def _set(self, name: str, value: float, /, **labels: Any) -> None:
        name, own = _word(f"hvdtrain_{name}"), {_word(key): str(x) for key, x in {"run": self._run, **labels}.items()}
        metric = self._client.Metric(name, "", "gauge")
        before = self._metrics[name].samples if name in self._metrics else ()
        metric.samples = [one for one in before if one.labels != own]
        metric.add_sample(name, own, float(value))
        self._metrics[name] = metric

    def _publish(self, **values: float) -> None:
        for name, value in values.items():
            self._set(name, value)
        if not self._server:
            self._client.write_to_textfile(self._path, self._registry)

    def close(self) -> None:
        """Say that the run is over, in the file; a port answers no more."""
        self._publish(running=0)
        if self._server:
            self._server[0].shutdown()
            self._server[0].server_close()


def _word(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]|^(?=[0-9])", "_", text)
