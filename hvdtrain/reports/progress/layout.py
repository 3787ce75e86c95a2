"""Layout of the line of progress for a terminal of any width. Pure.

The line fills the width to its last column: what others write after it, such as the words of a rank that fails, then
begins on a line of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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
    """Return the pieces of the line in order, all that is known."""
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
        found.append(_Piece(1, f"{s.percent:.0f} % {'solo' if brief else 'of solo'}", "green"))
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
    """Return the first ``columns`` characters."""
    out: list[Styled] = []
    for text, style in styled:
        out.append((text[:columns], style))
        columns -= len(out[-1][0])
    return out
