"""The HTML report that a run writes as it ends, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.protocols import Record
from hvdtrain.core.terminal import say
from hvdtrain.engine.run import Run
from hvdtrain.reports import survivor

AFTER_S = 2.0
"""A run that has lasted so long has something to tell: from the next record on a process waits for its end."""

QUIT_S = 10.0
"""How long a process that is no longer needed may take to go."""

MOST_HERE_BYTES = 32 * 2**20
"""A longer log is read by a process of its own, while the run ends."""


class Survivor:
    """A `hvdtrain.core.protocols.Report` that shows nothing: it starts the process that outlives rank 0."""

    every = f"{10**9} step"
    """No step is its turn: some other record comes every few seconds."""
    at_once = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self._child: subprocess.Popen[bytes] | None = None
        self._since = time.monotonic()

    def write(self, record: Record) -> None:
        """Start it where the run has lasted long enough."""
        if self._child is None and time.monotonic() - self._since >= AFTER_S:
            self.start()

    def start(self) -> None:
        """Start it, where none is at work; OSError."""
        if self._child is None:
            self._child = start_survivor(self._run.out)

    def tell(self, word: bytes) -> None:
        """Say what it is to do; the last word that it gets."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                assert child.stdin is not None
                child.stdin.write(word)
                child.stdin.close()
                if word == survivor.QUIT:
                    child.wait(QUIT_S)

    def close(self) -> None:
        """Continue: the end of the records is not the end of the run."""


def start_survivor(out: Path) -> subprocess.Popen[bytes]:
    """Start the process that writes the page of the run in ``out`` after this one's end. OSError."""
    root = str(ROOT.parent)
    command = [sys.executable, "-I", "-S", "-c", survivor.START, os.path.abspath(out), str(os.getpid()), root]
    # A session of its own: signals to the ranks' group do not reach it, and a launcher does not wait for it.
    return subprocess.Popen(command, env=survivor.environment(root), cwd="/", stdin=subprocess.PIPE, bufsize=0,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


@contextlib.contextmanager
def page_at_end(run: Run) -> Iterator[None]:
    """Enclose a fit, from its first step to its completion record: at its end, good or bad, the page is written."""
    if run.control.rank != 0:
        yield
        return
    beside = Survivor(run)
    run.records.also(beside)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # the error itself is what is to be heard
            _failed(run, beside, error)
        raise
    if run.begun:
        write(run.out)
    beside.tell(survivor.QUIT)


@contextlib.contextmanager
def stored_at_end(run: Run) -> Iterator[None]:
    """Enclose a fit: of a run under a URL, upload the report and the last records at its end, good or bad."""
    failed = True
    try:
        yield
        failed = run.state.requeue
    finally:
        if run.directory.storage is not None:
            run.directory.storage.finish(failed)


def _failed(run: Run, beside: Survivor, error: BaseException) -> None:
    if not run.begun:
        return
    if "failed" not in run.records.latest:
        survivor.append(run.out, survivor.failure(error, run.control.rank), again=True)
    if launch_facts(os.environ).kind == "solo":
        write(run.out)
        beside.tell(survivor.QUIT)
    else:  # the others wait to hear of it
        beside.start()
        beside.tell(survivor.WRITE)


def write(out: Path) -> None:
    """Write the page of the run in ``out``; say why not where that fails. Raises nothing."""
    try:
        if (out / RunDirectory.LOG).stat().st_size > MOST_HERE_BYTES:
            survivor.start(out)
            return
        from hvdtrain.reports import html as report

        report.write(out)
    except UserError as error:
        say(f"note: {RunDirectory.REPORT} is not written: {error}")
    except Exception as error:  # a page never ends a run
        say(f"note: {RunDirectory.REPORT} could not be written ({type(error).__name__}: {error}); python -m hvdtrain "
            f"report {out} tries again")
