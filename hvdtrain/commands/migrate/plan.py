"""Plan the migration of one script: recognise its kind, edit it in memory, check the result, collect findings.

Does not read, print or write files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import libcst as cst
from libcst import metadata

from hvdtrain.commands.migrate import habits
from hvdtrain.commands.migrate.edit import apply
from hvdtrain.commands.migrate.finding import Context, Finding, MigrateOptions, Refused, Rewrite
from hvdtrain.commands.migrate.rules.torch import TORCH_RULES
from hvdtrain.commands.migrate.scan import Scan
from hvdtrain.commands.migrate.source import ScriptSource, parse
from hvdtrain.core.errors import UserError, nearest

RULES = ("horovod_keras", "horovod_torch", "accelerate", "ddp", "tf_distribute", "data_parallel", "hvdtrain",
         "keras_fit")
"""Kinds of scripts in the order they are asked. Horovod's first, since its scripts may mention others; ``hvdtrain``: a
script that was moved already, which may call Keras' ``fit``."""

TARGETS = ("auto", "hvdtrain.keras", "trainer")
MOST_RANKS = 1_000_000
IN_EVERY_MODULE = {"__file__", "__annotations__", "__class__"}


@dataclass(frozen=True)
class Migration:
    """``kind``: the rule's name, "" where none recognised it. ``after``: its bytes, edited or not."""

    source: ScriptSource
    kind: str
    title: str
    after: bytes
    findings: tuple[Finding, ...]
    snippet: str = ""


def rule(name: str) -> Any:
    """Return the rule of this name."""
    return TORCH_RULES.get(name) or import_module(f"hvdtrain.commands.migrate.rules.{name}")


def check(options: MigrateOptions) -> None:
    """Raise `UserError` for an unknown target or an impossible number of ranks."""
    if options.target not in TARGETS:
        raise UserError(f"--to is {options.target!r}", nearest(options.target, TARGETS), "correct --to")
    if not 1 <= options.ranks <= MOST_RANKS:
        raise UserError(f"--ranks is {options.ranks}", f"1 to {MOST_RANKS}",
                        "give the number of processes of the old job")


def undefined_names(module: cst.Module) -> set[str]:
    """Return the names that a module reads where nothing binds them, or above the line of their scope that does.

    Loops are read once, from the top. A ``from x import *`` may bind anything: then there are none.
    """
    scopes = metadata.MetadataWrapper(module, unsafe_skip_copy=True)
    places = scopes.resolve(metadata.PositionProvider)
    if any(isinstance(node, cst.ImportStar) for node in places):
        return set()
    found: set[str] = set()
    for scope in {scope for scope in scopes.resolve(metadata.ScopeProvider).values() if scope is not None}:
        for access in scope.accesses:
            late = [one for one in access.referents if one.scope is scope and isinstance(one, metadata.Assignment)
                    and places[one.node].start.line > places[access.node].start.line]
            if len(late) == len(access.referents):
                found |= {inner.value for inner in (access.node, *_bases(access.node)) if isinstance(inner, cst.Name)}
    return found - IN_EVERY_MODULE


def _bases(node: cst.CSTNode) -> list[cst.BaseExpression]:
    return [node.value, *_bases(node.value)] if isinstance(node, cst.Attribute) else []


def _planned(kind: Any, scan: Scan, options: MigrateOptions, snippet: bool) -> tuple[Rewrite, bool]:
    try:
        return kind.plan(scan, options), False
    except Refused as refused:
        text = kind.snippet(scan) if snippet and hasattr(kind, "snippet") else ""
        return Rewrite(findings=[refused.finding], snippet=text), refused.elsewhere


def migrate(source: ScriptSource, options: MigrateOptions) -> Migration:
    """Plan and make the rewrite of one script, in memory; `UserError` for a target that its kind does not have."""
    check(options)
    scan = Scan(source.module)
    name = next((name for name in RULES if rule(name).recognise(scan)), "")
    if not name:
        return Migration(source, "", "", source.data, ())
    kind, target = rule(name), options.target
    if target not in ("auto", *kind.TARGETS):
        raise UserError(f"{source.name} is {kind.TITLE}, and --to is {target}",
                        nearest(target, ("auto", *kind.TARGETS)), "leave --to out")
    to = kind.TARGETS[0] if target == "auto" else target
    made, elsewhere = _planned(kind, scan, MigrateOptions(to, options.ranks), target != "hvdtrain.keras")
    if elsewhere and target == "auto":
        to = kind.TARGETS[1]
        other, _ = _planned(kind, scan, MigrateOptions(to, options.ranks), True)
        made = replace(other, findings=[*made.findings, *other.findings])
    after = apply(scan, made.edits).bytes
    edited = parse(source.name, after)
    lost = sorted(undefined_names(edited) - undefined_names(source.module)) if made.edits else []
    if lost:  # such as an import inside a function, or one below the code that the edit would serve
        made = Rewrite()
        made.tell(1, "by hand", f"{', '.join(lost)} would be read where nothing binds it",
                  "the edit puts in, or leaves, a name that this script binds elsewhere or later",
                  "import and make it at the top of the file, then run migrate again")
        after = source.data
    findings = sorted({*made.findings, *habits.look(scan, Context(name, to, bool(made.edits)))})
    return Migration(source, name, kind.TITLE, after, tuple(findings), made.snippet)
