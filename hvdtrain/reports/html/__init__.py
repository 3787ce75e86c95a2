"""The page about a run: one HTML file, made from the files in the run's directory alone, so that any end leaves one."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.checkpoint.run_directory import RunDirectory


def write(*run_dirs: Path, out: Path | None = None) -> Path:
    """Write the page of a run, or of several side by side; return its path: ``out``, or report.html in the first.

    `UserError` where there is no run; OSError where files cannot be read or written.
    """
    from hvdtrain.reports.html import page

    path = out or run_dirs[0] / RunDirectory.REPORT
    page.put(path, page.of_runs(run_dirs))
    return path
