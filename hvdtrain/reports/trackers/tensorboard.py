"""TensorBoard's event files in ``tensorboard/`` of the run's directory: ``tensorboard --logdir runs`` shows all runs.

Curves as scalars, the configuration under HPARAMS. Written by tensorboard's own record writer, which needs no
TensorFlow. A resumed run adds a file, whose first event tells TensorBoard to forget the steps since the checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from hvdtrain.core.protocols import Record, RecordedRun
from hvdtrain.core.records import numbers, settings

MODULE = PACKAGE = "tensorboard"
ARGUMENT = MEANS = ""
APART_S = 0.0  # a step costs 34 us of CPU


class Tensorboard:
    """Appends scalars and hyperparameters to a file of events; each record is on disk when `write` returns."""

    def __init__(self, run: RecordedRun, argument: str) -> None:
        # Not EventFileWriter: it asks for TensorFlow's file systems, and so imports TensorFlow where that is installed.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._run, self._event, self._session = run, event_pb2.Event, event_pb2.SessionLog
        self._summary, self._hparams, self._writer = summary_pb2.Summary, hparams_pb, RecordWriter
        self._file: Any = None

    def write(self, record: Record) -> None:
        if self._file is None:
            folder = self._run.out / "tensorboard"
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
            self._file = self._writer((folder / name).open("xb"))
            self._add(record, file_version="brain.Event:2")
            self._add(record, session_log=self._session(status=self._session.START))
        if record.event == "start":
            self._add(record, summary=self._hparams(settings(record), str(self._run.out), record.time_s))
        if found := numbers(record):
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in found.items()]
            self._add(record, summary=self._summary(value=values))

    def _add(self, record: Record, **what: Any) -> None:
        self._file.write(self._event(wall_time=record.time_s, step=record.step, **what).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
