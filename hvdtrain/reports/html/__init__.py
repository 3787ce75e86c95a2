"""The page about a run: one HTML file, made from the files in the run's directory alone, so that any end leaves one."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.checkpoint.run_directory import RunDirectory


def write(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of the run in ``run_dir`` and return its path: ``out``, or report.html in the run's directory.

    `hvdtrain.reports.html.facts.ReportError` where there is no run; OSError where files cannot be read or written.
    """
    return write_of([run_dir], out)


def write_of(run_dirs: list[Path], out: Path | None = None) -> Path:
    """Write one page of one run, or of several side by side, as `write` does; by default beside the first."""
    from hvdtrain.reports.html import page

    path = out or run_dirs[0] / RunDirectory.REPORT
    page.put(path, page.of_runs(run_dirs))
    return path
