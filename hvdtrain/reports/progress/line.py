"""The line of progress at the bottom of a terminal: its layout for any width, and its drawing by rich.

Draws from two threads: the run's, and that which announces the phase of a silent run.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.core.terminal import Stdout

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
        self.standing: Standing | None = None
        self.doing = ""
        self._terminal = terminal
        self._lock = threading.Lock()
        self._live: Any = None
        self._beat = 0
        self._closed = False

    def show(self, standing: Standing | None) -> None:
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
            pieces = (silent(self.doing, columns, self._beat) if self.standing is None else
                      line(self.standing, columns, self.doing))
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


def _text(pieces: list[Styled]) -> Any:
    from rich.text import Text

    return Text.assemble(*pieces, no_wrap=True, overflow="crop")


def _on_terminal(stream: Any) -> bool:
    """Return whether a stream leads to a terminal: only then may rich print for it there."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(stream.isatty())
    return False


GAP = "  "
LEAST_BAR = 8
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

Styled = tuple[str, str]
"""(text, style of rich)."""


@dataclass(frozen=True)
class Standing:
    """Position of a run: ``step`` of ``total`` (None: not known), and what else the line shows.

    ``epoch``: whole epochs before. ``percent``: of the sum of solo speeds, None for one rank. ``left_s``: seconds.
    """

    step: int
    total: int | None
    epoch: int
    epochs: int
    loss: float = math.nan
    samples_per_s: float = math.nan
    percent: float | None = None
    left_s: float | None = None


class _Piece(NamedTuple):
    """A part of the line; where the width does not do, that of the least ``rank`` goes first."""

    rank: int
    text: str
    style: str
    bar: bool = False

    def width(self) -> int:
        return LEAST_BAR if self.bar else len(self.text)


def clock(seconds: float) -> str:
    """Return "0:07", "12:34" or "1:02:03"."""
    minutes, s = divmod(max(0, int(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def short(number: float) -> str:
    """Return a speed in at most five characters: "987", "12.3k", "4.56M"."""
    for size, unit in ((1.0, ""), (1e3, "k"), (1e6, "M")):
        if number < 999.5 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number / 1e9:.3g}G"


def line(s: Standing, columns: int, doing: str = "") -> list[Styled]:
    """Return the line, ``columns`` wide; ``doing``: what the run does in place of steps, and since when.

    Where all of it does not fit, it is said shorter; then the least telling is left out.
    """
    pieces = _pieces(s, doing, False)
    if _width(pieces) > columns:
        pieces = _pieces(s, doing, True)
    while _width(pieces) > columns and len(pieces) > 1:
        pieces.remove(min(pieces))
    return _cut(_filled(s, pieces, columns - _width(pieces)), columns)


def silent(doing: str, columns: int, beat: int) -> list[Styled]:
    """Return the line of a run that makes no steps yet: what it does, and since when; ``beat`` counts its drawings."""
    return _cut([(f"{SPINNER[beat % len(SPINNER)]} ", "green"), (doing.ljust(columns), "")], columns)


def _pieces(s: Standing, doing: str, brief: bool) -> list[_Piece]:
    found = [_Piece(2, f"{'ep' if brief else 'epoch'} {min(s.epoch + 1, s.epochs)}/{s.epochs}", "bold")]
    found += [_Piece(4, "", "green", bar=True)] if s.total else []
    found.append(_Piece(9, f"{s.step}/{s.total}" if s.total else f"step {s.step}", ""))
    if doing:
        return [*found, _Piece(8, doing, "bold")]
    if not math.isnan(s.loss):
        found.append(_Piece(7, f"loss {s.loss:.4g}" if brief else f"loss {s.loss:.4f}", "cyan"))
    if not math.isnan(s.samples_per_s):
        speed = f"{short(s.samples_per_s)}/s" if brief else f"{s.samples_per_s:,.0f} samples/s"
        found.append(_Piece(3, speed, "green"))
    if s.percent is not None:
        found.append(_Piece(1, f"{s.percent:.0f} % {'eff' if brief else 'efficiency'}", "green"))
    if s.left_s is not None:
        found.append(_Piece(6, f"eta {clock(s.left_s)}", "yellow"))
    return found


def _width(pieces: list[_Piece]) -> int:
    return sum(piece.width() for piece in pieces) + len(GAP) * (len(pieces) - 1)


def _filled(s: Standing, pieces: list[_Piece], room: int) -> list[Styled]:
    """Return the pieces with gaps between; the bar, or blanks at the end, take the ``room`` that is left."""
    out: list[Styled] = []
    for piece in pieces:
        out += [(GAP, "")] if out else []
        if piece.bar and s.total:
            n = LEAST_BAR + max(0, room)
            done = min(n, n * s.step // s.total)
            out += [("━" * done, piece.style), ("━" * (n - done), "bright_black")]
            room = 0
        else:
            out.append((piece.text, piece.style))
    return [*out, (" " * max(0, room), "")]


def _cut(styled: list[Styled], columns: int) -> list[Styled]:
    out: list[Styled] = []
    for text, style in styled:
        out.append((text[:columns], style))
        columns -= len(out[-1][0])
    return out
