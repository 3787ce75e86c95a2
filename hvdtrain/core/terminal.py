"""Print lines to a stdout that may be closed, full or absent.

Owns the one way in which a run prints: through the logger ``hvdtrain``. Knows nothing of terminals and progress lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any, cast

import numpy as np

from hvdtrain.core.launcher import launch_facts

_UNREAD = (OSError, ValueError, AttributeError)
"""What writing to a stdout raises that is full, closed, or none at all (Python's stdout is then None)."""


class StdoutHandler(logging.Handler):
    """Prints messages on the stdout of now, without a lock: a thread that exits must not wait for one that prints."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Print ``record`` unless it is on stderr already."""
        if record.levelno >= self.level and not record.__dict__.get("printed") and self.filter(record):
            _print(record.getMessage())
        return True


LOGGER = logging.getLogger("hvdtrain")
"""Gets every message; its handler prints what a user sees by default. Not the root logger's: messages would be there
twice."""
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False
LOGGER.addHandler(StdoutHandler())


def _placed(record: logging.LogRecord) -> bool:
    """Give ``record`` rank and host. As a filter: ``extra`` refuses names that a script's record factory sets, too."""
    record.__dict__.setdefault("rank", launch_facts(os.environ).rank)
    record.__dict__.setdefault("host", socket.gethostname())
    return True


LOGGER.addFilter(_placed)


def say(line: str) -> None:
    """Log one line, which prints it; a note has the level WARNING, any other line INFO."""
    log(line, logging.WARNING if line.startswith("note: ") else logging.INFO)


def log(text: str, level: int, printed: bool = False) -> None:
    """Pass ``text`` to the logger `LOGGER`, with rank and host as fields. ``printed``: it is on stderr already."""
    LOGGER.disabled = False  # logging.config disables the loggers that a script's settings do not name
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s", text, stacklevel=3, extra={"printed": printed})


def _print(line: str) -> None:
    """Print one line in one write (mpirun tags every write), and continue where nobody reads any more.

    A run must not end because the reader of its output did, such as ``| head`` or a full disk.
    """
    try:
        try:
            sys.stdout.write(line + "\n")
        except UnicodeEncodeError:
            sys.stdout.write(escaped(line, sys.stdout) + "\n")
        sys.stdout.flush()
    except _UNREAD:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout = open(os.devnull, "w", encoding="utf-8")


def escaped(text: str, stream: Any) -> str:
    """Return ``text`` with escapes in place of what the encoding of ``stream`` does not hold."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Stdout:
    """Pass on what a library prints to the stdout of now; drop the rest: a broken pipe makes rich end the program."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._stream: Any = sys.stdout
        self.encoding = getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(*_UNREAD):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(escaped(text, self._stream))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*_UNREAD):
            self._stream.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(*_UNREAD):
            return bool(self._stream.isatty())
        return False


Rows = Sequence[Sequence[str]]

_NUMBER = re.compile(r"(-?[\d,]*\.?\d+(e[+-]?\d+)?([x%]| (B|[KMGT]iB|ms|s))?|N/A|-|\?|)")
PLAIN_COLUMNS = 64
"""Width of a box where no terminal tells its own; leaves room for the tag that horovodrun puts before each line."""


def show(title: str, headers: Sequence[str], rows: Rows, markdown: bool = False, launched: bool = False) -> None:
    """Print one table; on rank 0. ``launched``: under mpirun, whose pseudo-terminals are none."""
    if markdown:
        say(f"\n{title}\n\n{as_markdown(headers, rows)}\n")
    elif launched or not sys.stdout.isatty():
        say(f"\n{title}\n{as_text(headers, rows)}")
    else:
        _rich(title, headers, rows)


def note(text: str) -> None:
    """Print a remark on one line."""
    say(f"note: {text}")


def as_text(headers: Sequence[str], rows: Rows, indent: str = "") -> str:
    """Return columns set apart by two spaces, numbers to the right, under a rule. Pure."""
    whole = [list(headers), *map(list, rows)]
    widths = [max(len(row[i]) for row in whole) for i in range(len(headers))]
    right = numeric(headers, rows)

    def line(cells: Sequence[str]) -> str:
        return indent + "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right)).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


def as_markdown(headers: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table, numbers to the right; | in a cell is escaped. Pure."""
    marks = ["---:" if right else "---" for right in numeric(headers, rows)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(headers), "|" + "|".join(marks) + "|", *map(line, rows)])


def numeric(headers: Sequence[str], rows: Rows) -> list[bool]:
    """Return which columns hold numbers, with or without a unit, or N/A, - and ? alone. Pure."""
    return [all(_NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(headers))]


def _rich(title: str, headers: Sequence[str], rows: Rows) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.ROUNDED, title=Text(title), title_justify="left")
    for header, right in zip(headers, numeric(headers, rows)):
        table.add_column(Text(header), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: rich would read [brackets] as markup
    with console.capture() as text:
        console.print(table)
    say(text.get().rstrip())


def facts(title: str, rows: Iterable[tuple[str, str]], plain: bool) -> str:
    """Return a box of names and values, ``plain`` for a file or launcher. Errors: ImportError without rich."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=cast(IO[str], Stdout()), highlight=False, force_terminal=False if plain else None,
                      width=PLAIN_COLUMNS if plain else None)
    table = Table(box=box.ROUNDED if console.is_terminal else box.ASCII, show_header=False, title=title)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))  # as it is: rich would read [brackets] as markup
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip()


def spread(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return median, quartiles, smallest and largest of at least one sample, in the samples' own unit."""
    low, p25, median, p75, high = np.percentile(np.asarray(samples, np.float64), [0, 25, 50, 75, 100])
    return {"median": float(median), "p25": float(p25), "p75": float(p75), "min": float(low), "max": float(high)}
