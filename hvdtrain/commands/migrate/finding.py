"""Findings about a script, and the rewrite that a rule plans. Does not edit: ``edit`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import libcst as cst

from hvdtrain.commands.migrate.edit import Edits

Kind = Literal["unsafe", "by hand", "changed", "note"]
"""unsafe: trains wrongly, hangs, or may; by hand: left to the user; changed: edited, with another meaning in some
respect; note: good to know."""


@dataclass(frozen=True, order=True)
class Finding:
    """``line`` counts from 1 in the file as it was read. ``what``, ``why`` and ``do`` are clauses without full stop."""

    line: int
    kind: Kind
    what: str
    why: str
    do: str

    def text(self, path: str) -> str:
        """Return three lines: ``path:line: kind: what``, why, do."""
        return f"{path}:{self.line}: {self.kind}: {self.what}\n    why: {self.why}\n    do: {self.do}"


class Refused(Exception):
    """A rule cannot prove its edit faithful. ``elsewhere``: another target takes the script: only a note."""

    def __init__(self, line: int, what: str, why: str, do: str, elsewhere: bool = False) -> None:
        super().__init__(what)
        self.finding = Finding(line, "note" if elsewhere else "by hand", what, why, do)
        self.elsewhere = elsewhere


@dataclass(frozen=True)
class MigrateOptions:
    """Options of the command. ``ranks``: the number of processes of the old job."""

    target: str = "auto"
    ranks: int = 1


@dataclass
class Rewrite:
    """``edits``: none where the whole could not be done. ``snippet``: code to continue from by hand, "" if none."""

    edits: Edits = field(default_factory=Edits)
    findings: list[Finding] = field(default_factory=list)
    snippet: str = ""

    def tell(self, line: int, kind: Kind, what: str, why: str, do: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(line, kind, what, why, do))


@dataclass(frozen=True)
class OldCall:
    """A call with another form today. ``edit``: plans that form, or None; the rest as in `Finding`."""

    node: cst.CSTNode
    what: str
    do: str
    edit: Callable[[Edits], None] | None = None
    why: str = "Keras 3 ends with an error there"


@dataclass(frozen=True)
class Context:
    """``kind``: the rule that recognised the script; ``target``: where it goes; ``edited``: whether it is rewritten."""

    kind: str
    target: str
    edited: bool
