"""From sources to what is shown: the rule that recognises each, its edits, and what is unsafe in it.

Owns the order: recognise, plan, edit, check that the result compiles, look for habits. Does not read, print or write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.commands.migrate import bound, habits
from hvdtrain.commands.migrate.edit import apply
from hvdtrain.commands.migrate.finding import Finding, Refused
from hvdtrain.commands.migrate.rules import TARGETS, Plan, Wish, recognised, rule
from hvdtrain.commands.migrate.scan import Scan
from hvdtrain.commands.migrate.source import Source, parse
from hvdtrain.core.errors import UserError, nearest

MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class Migration:
    """One script's. ``kind``: the rule's name, "" where none recognised it. ``after``: its bytes, edited or not."""

    source: Source
    kind: str
    title: str
    after: bytes
    findings: tuple[Finding, ...]
    snippet: str = ""


def check(wish: Wish) -> None:
    """Raise `UserError` for a target or a number of ranks that cannot be."""
    if wish.target not in TARGETS:
        raise UserError(f"--to is {wish.target!r}", nearest(wish.target, TARGETS), "correct --to")
    if not 1 <= wish.ranks <= MOST_RANKS:
        raise UserError(f"--ranks is {wish.ranks}", f"1 to {MOST_RANKS}",
                        "give the number of processes of the old job")


def _planned(found: Any, scan: Scan, wish: Wish, snippet: bool) -> tuple[Plan, bool]:
    """What a rule plans, and whether another target may take what it refuses; ``snippet``: with the code of that."""
    try:
        return found.plan(scan, wish), False
    except Refused as refused:
        text = found.snippet(scan) if snippet and hasattr(found, "snippet") else ""
        return Plan(findings=[refused.finding], snippet=text), refused.elsewhere


def migrate(source: Source, wish: Wish) -> Migration:
    """Plan and make the rewrite of one script, in memory; `UserError` for a target that its kind does not have."""
    check(wish)
    scan = Scan(source.module)
    kind = recognised(scan)
    if not kind:
        return Migration(source, "", "", source.data, ())
    found = rule(kind)
    if wish.target not in ("auto", *found.TARGETS):
        raise UserError(f"{source.name} is {found.TITLE}, and --to is {wish.target}",
                        nearest(wish.target, ("auto", *found.TARGETS)), "leave --to out")
    target = found.TARGETS[0] if wish.target == "auto" else wish.target
    made, elsewhere = _planned(found, scan, Wish(target, wish.ranks), wish.target != "hvdtrain.keras")
    if elsewhere and wish.target == "auto":
        other, _ = _planned(found, scan, Wish(found.TARGETS[1], wish.ranks), True)
        made, target = replace(other, findings=[*made.findings, *other.findings]), found.TARGETS[1]
    after = apply(scan, made.edits).bytes
    assert parse(source.name, after) is not None
    lost = sorted(bound.unbound(after) - bound.unbound(source.data)) if made.edits else []
    if lost:  # such as an import inside a function, or one below the code that the edit would serve
        made = Plan(findings=[Finding(1, "by hand", f"{', '.join(lost)} would be read where nothing binds it",
                                      "the edit puts in, or leaves, a name that this script binds elsewhere or later",
                                      "import and make it at the top of the file, then run migrate again")])
        after = source.data
    findings = sorted({*made.findings, *habits.look(scan, kind, target, bool(made.edits))})
    return Migration(source, kind, found.TITLE, after, tuple(findings), made.snippet)
