"""MLflow: ``mlflow`` writes ``mlruns/`` in the run's directory, ``mlflow:URI`` another folder or to a server.

A resumed run continues with its curves by the id in ``mlflow.id``; settings that have changed become tags.
"""

from __future__ import annotations

import os
import re
from typing import Any

from hvdtrain.core.protocols import Record, RecordedRun
from hvdtrain.core.records import numbers, settings
from hvdtrain.reports.trackers import kept

MODULE, PACKAGE = "mlflow", "mlflow-skinny"
ARGUMENT, MEANS = ".*", ", or mlflow: and a folder or address"
APART_S = 1.0  # a step costs 400 us of CPU, a request to a server more


class Mlflow:
    """Logs to one run of an MLflow experiment."""

    def __init__(self, run: RecordedRun, uri: str) -> None:
        for switch in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):  # else it wants a data base
            os.environ.setdefault(switch, "true")
        from mlflow import MlflowClient, entities

        uri = uri or os.environ.get("MLFLOW_TRACKING_URI", "") or (run.out / "mlruns").resolve().as_uri()
        self._client, self._entities, self._ended = MlflowClient(tracking_uri=uri), entities, False
        self._id = kept(run.out / "mlflow.id", lambda: self._made(run.out.name))
        self._client.update_run(self._id, "RUNNING")

    def _made(self, run_name: str) -> str:
        there = self._client.get_experiment_by_name(name := os.environ.get("MLFLOW_EXPERIMENT_NAME", "hvdtrain"))
        within = there.experiment_id if there else self._client.create_experiment(name)
        return str(self._client.create_run(within, run_name=run_name).info.run_id)

    def write(self, record: Record) -> None:
        self._ended |= record.event == "end"
        what, at = self._entities, (int(1000 * record.time_s), record.step)
        self._log("metrics", [what.Metric(_key(name), x, *at) for name, x in numbers(record).items()])
        if found := {_key(name): str(value)[:500] for name, value in settings(record).items()}:
            before = self._client.get_run(self._id).data.params
            self._log("params", [what.Param(name, text) for name, text in found.items() if name not in before])
            self._log("tags", [what.RunTag(name, t) for name, t in found.items() if before.get(name, t) != t])

    def _log(self, kind: str, rows: list[Any]) -> None:
        for first in range(0, len(rows), 100):  # MLflow takes no more at once
            self._client.log_batch(self._id, **{kind: rows[first:first + 100]})  # type: ignore[arg-type]

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED" if self._ended else "FAILED")


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)
