"""What shows or keeps a run's records (`hvdtrain.protocols.Report`): a file each, on rank 0 alone."""

from __future__ import annotations

from typing import Any

from hvdtrain import trackers
from hvdtrain.protocols import Report
from hvdtrain.reports import jsonl, progress


def make(run: Any, launched: bool) -> list[Report]:
    """Return the reports that ``run.config`` asks for: log.jsonl, progress, trackers. ``launched``: by an MPI launcher.
    """
    return [jsonl.Jsonl(run), *progress.make(run.config, launched), *trackers.make(run)]
