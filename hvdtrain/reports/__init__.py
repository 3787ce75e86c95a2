"""Reports of a run's records (`hvdtrain.core.protocols.Report`): log, progress, trackers, HTML; on rank 0 alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hvdtrain.config import Config
    from hvdtrain.core.protocols import RecordedRun, Report

    class ReportedRun(RecordedRun, Protocol):
        """A run from which reports are made."""

        config: Config


def make(run: ReportedRun, launched: bool) -> list[Report]:
    """Return the reports of ``run.config``: log.jsonl, progress, trackers. ``launched``: by an MPI launcher."""
    # Imported here: processes without site-packages, such as the one that outlives rank 0, import modules below.
    from hvdtrain.reports import jsonl
    from hvdtrain.reports.progress import make as make_progress
    from hvdtrain.reports.trackers import make as make_trackers

    return [jsonl.Jsonl(run), *make_progress(run.config, launched), *make_trackers(run)]
