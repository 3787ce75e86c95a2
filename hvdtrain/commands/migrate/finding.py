"""One thing to tell about a script: where, what, why, and what to do. Owns the type and its text only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["unsafe", "by hand", "changed", "note"]
KINDS: tuple[Kind, ...] = ("unsafe", "by hand", "changed", "note")
"""unsafe: trains wrongly, hangs, or may; by hand: left as it was, to be written anew; changed: edited, and not
the same in every respect; note: good to know."""


@dataclass(frozen=True, order=True)
class Finding:
    """``line`` counts from 1 in the file as it was read. ``what``, ``why`` and ``do`` are clauses without full stop."""

    line: int
    kind: Kind
    what: str
    why: str
    do: str

    def text(self, path: str) -> str:
        """Three lines: ``path:line: kind: what``, why, do."""
        return f"{path}:{self.line}: {self.kind}: {self.what}\n    why: {self.why}\n    do: {self.do}"


class Refused(Exception):
    """A rule cannot prove that its edit of a script would be faithful; ``finding`` says at what and what to do.

    ``elsewhere``: another target takes what stands against this one; the finding is a note then.
    """

    def __init__(self, line: int, what: str, why: str, do: str, elsewhere: bool = False) -> None:
        super().__init__(what)
        self.finding = Finding(line, "note" if elsewhere else "by hand", what, why, do)
        self.elsewhere = elsewhere
