"""What shows or keeps a run's records (`hvdtrain.protocols.Report`): a file each, on rank 0 alone."""

from __future__ import annotations

from typing import Any

from hvdtrain.protocols import Report
from hvdtrain.reports import jsonl
from hvdtrain.reports.progress import make as make_progress
from hvdtrain.trackers import make as make_trackers


def make(run: Any, launched: bool) -> list[Report]:
    """Return the reports that ``run.config`` asks for: log.jsonl, progress, trackers. ``launched``: by an MPI launcher.
    """
    return [jsonl.Jsonl(run), *make_progress(run.config, launched), *make_trackers(run)]
