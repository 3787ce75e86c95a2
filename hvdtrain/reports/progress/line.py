"""The line of progress at the bottom of a terminal; what is printed meanwhile appears above it.

Owns the drawing, by rich, from two threads: the run's, and that which announces the phase of a silent run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from hvdtrain.core.terminal import Stdout
from hvdtrain.reports.progress import layout

LOCK_S = 1.0
"""Longest wait for the other thread to end its drawing before a run's last words."""


class OwnTerminal(Stdout):
    """This process' standard output."""

    def columns(self) -> int:
        """Return its width now; 80 where it does not tell."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80


def line_terminal(kind: str, launched: bool, env: Mapping[str, str] = os.environ) -> OwnTerminal | None:
    """Return the terminal for config ``progress`` of ``kind``; None where lines are to be printed, or nothing.

    "rich" draws also where no terminal is found. ``launched``: mpirun gives ranks pseudo-terminals even where its own
    output goes to a file.
    """
    own = OwnTerminal()
    return own if kind == "rich" or kind == "auto" and not launched and moves(env) and own.isatty() else None


def moves(env: Mapping[str, str]) -> bool:
    """Return whether a line can be redrawn here, by ``TERM`` and ``CI`` (whose terminals only feed a log)."""
    return env.get("TERM", "") not in ("", "dumb", "unknown") and env.get("CI", "").lower() not in ("1", "true")


class Line:
    """A line on ``terminal``. It shows ``standing`` and ``doing`` (either may be absent), when `draw` is called."""

    def __init__(self, terminal: OwnTerminal) -> None:
        self.standing: layout.Standing | None = None
        self.doing = ""
        self._terminal = terminal
        self._lock = threading.Lock()
        self._live: Any = None
        self._beat = 0
        self._closed = False

    def show(self, standing: layout.Standing | None) -> None:
        """Draw where a run stands; None: no longer."""
        self.standing, self.doing = standing, ""
        self.draw()

    def say(self, doing: str) -> None:
        """Draw what a silent run does, and since when; "": it is silent no longer."""
        if doing or self.doing:
            self.doing = doing
            self.draw()

    def draw(self) -> None:
        """Draw, or take the line away where there is nothing to show."""
        with self._lock:
            if self._closed:
                return
            if self.standing is None and not self.doing:
                self._stop()
                return
            self._beat += 1
            if self._live is None:
                self._live = self._start()
            columns = self._terminal.columns()
            pieces = (layout.silent(self.doing, columns, self._beat) if self.standing is None else
                      layout.line(self.standing, columns, self.doing))
            self._live.console.width = columns
            self._live.update(_text(pieces), refresh=True)

    def close(self) -> None:
        """Take the line away for good; what is drawn later is not. Waits for nobody for long."""
        held = self._lock.acquire(timeout=LOCK_S)
        try:
            self._closed = True
            self._stop()
        finally:
            if held:
                self._lock.release()

    def _start(self) -> Any:
        from rich.console import Console
        from rich.live import Live

        class Visible(Console):
            """Leaves the cursor as it is: a process that is killed could not bring it back."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        console = Visible(file=self._terminal, force_terminal=True, legacy_windows=False,  # type: ignore[arg-type]
                          width=self._terminal.columns())
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=_on_terminal(sys.stderr))
        live.start()
        return live

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def _text(pieces: list[layout.Styled]) -> Any:
    from rich.text import Text

    return Text.assemble(*pieces, no_wrap=True, overflow="crop")


def _on_terminal(stream: Any) -> bool:
    """Return whether a stream leads to a terminal: only then may rich print for it there."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(stream.isatty())
    return False
