"""Migration of one script: read it, recognise its kind, edit it in memory, check the result, write it in one rename."""

from __future__ import annotations

import ast
import difflib
import os
import stat
import warnings
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import metadata

from hvdtrain.commands.migrate import habits
from hvdtrain.commands.migrate.edit import apply
from hvdtrain.commands.migrate.finding import Context, Finding, MigrateOptions, Refused, Rewrite
from hvdtrain.commands.migrate.rules.torch import TORCH_RULES
from hvdtrain.commands.migrate.scan import Scan
from hvdtrain.core import whole_file
from hvdtrain.core.errors import UserError, nearest

RULES = ("horovod_keras", "horovod_torch", "accelerate", "ddp", "tf_distribute", "data_parallel", "hvdtrain",
         "keras_fit")
"""Kinds of scripts in the order they are asked. Horovod's first, since its scripts may mention others; ``hvdtrain``: a
script that was moved already, which may call Keras' ``fit``."""

TARGETS = ("auto", "hvdtrain.keras", "hvdtrain.torch", "trainer")
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
            names = {inner.value for inner in (access.node, *_bases(access.node)) if isinstance(inner, cst.Name)}
            # A name that a function binds anywhere is its own from the top, whatever the module binds.
            own = {one for name in names for one in scope.assignments[name]}
            bound = own if own and isinstance(scope, metadata.FunctionScope) else access.referents
            late = [one for one in bound if one.scope is scope and isinstance(one, metadata.Assignment)
                    and places[one.node].start.line > places[access.node].start.line]
            if len(late) == len(bound):
                found |= names
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
        made.tell(1, "by hand", f"{', '.join(lost)} would be read where it is not defined",
                  "the edit adds or keeps a name that this script defines elsewhere or later",
                  "import and make it at the top of the file, then run migrate again")
        after = source.data
    findings = sorted({*made.findings, *habits.look(scan, Context(name, to, bool(made.edits)))})
    return Migration(source, name, kind.TITLE, after, tuple(findings), made.snippet)


MOST_BYTES = 2**21
"""Largest file that is read; a training script is a thousandth of it."""


@dataclass(frozen=True)
class ScriptSource:
    """``name``: as the user gave it. ``data``: its bytes. ``module``: their syntax tree, which gives them back."""

    name: str
    path: Path
    data: bytes
    module: cst.Module


def read(name: str) -> ScriptSource:
    """Return the parsed file; `UserError` where it is missing, no file, too large, or not Python of this version."""
    path = Path(name)
    try:
        if path.is_dir():
            raise UserError(f"{name} is a folder", "a Python file", "name the scripts in it")
        if path.exists() and not path.is_file():
            raise UserError(f"{name} is not a regular file", "a Python file", "name a script")
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {name}", "a Python file", "check the path") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name!r} cannot be read: {error}", "a readable Python file", "check the path") from None
    if len(data) > MOST_BYTES:
        raise UserError(f"{name} has {len(data)} bytes", f"{MOST_BYTES} at most", "name a script, not data")
    return ScriptSource(name, path, data, parse(name, data))


def of_text(text: str, name: str = "script.py") -> ScriptSource:
    """Return a source that is no file; `UserError` as in `read`."""
    data = text.encode()
    return ScriptSource(name, Path(name), data, parse(name, data))


def parse(name: str, data: bytes) -> cst.Module:
    """Return the syntax tree of ``data``; `UserError` with the line where it is not Python."""
    problem = _syntax(name, data)
    if problem:
        raise UserError(f"{name} is not Python that can be read: {problem}",
                        "a script that this Python can compile", "fix it; convert Python 2 with 2to3 first")
    try:
        module = cst.parse_module(data)
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise UserError(f"{name} cannot be parsed: {str(error).splitlines()[0]}", "Python that libcst can parse",
                        "simplify the statement it names") from None
    except (SyntaxError, UnicodeError) as error:  # compile passes over bytes of a comment
        raise UserError(f"{name} is not Python that can be read: {error}", "UTF-8, or the encoding that the file names",
                        "save it as UTF-8") from None
    if module.bytes != data:  # such as a byte order mark, or a lone carriage return
        raise UserError(f"{name} has bytes that its syntax tree does not reproduce", "plain Python text",
                        "save it as UTF-8 without a byte order mark, with one kind of line ends")
    return module


def _syntax(name: str, data: bytes) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as '\d' in a string: the user's, not asked about here
            compile(data, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        return f"{error.msg}" + (f", line {error.lineno}" if error.lineno else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error)
    return ""


def diff(source: ScriptSource, after: bytes) -> str:
    """Return a unified diff of ``source`` to ``after`` that ``patch`` takes; "" where nothing changes."""
    if after == source.data:
        return ""
    encoding = source.module.encoding
    before_lines, after_lines = (_lines(data.decode(encoding)) for data in (source.data, after))
    out = []
    for line in difflib.unified_diff(before_lines, after_lines, f"a/{source.name.lstrip('/')}",
                                     f"b/{source.name.lstrip('/')}"):
        out.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(out)


def _lines(text: str) -> list[str]:
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return lines + ([last] if last else [])


def write(source: ScriptSource, after: bytes) -> None:
    """Replace the file by ``after`` in one rename, mode kept; through a link, the file it leads to.

    Errors: `UserError` where it cannot be written, or has changed since it was read; it is then unchanged.
    """
    path = Path(os.path.realpath(source.path))
    try:
        if path.read_bytes() != source.data:
            raise UserError(f"{source.name} has changed since it was read", "the same file", "run migrate again")
        with whole_file(path) as draft, draft.open("xb") as file:
            draft.chmod(stat.S_IMODE(path.stat().st_mode))
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{source.name} cannot be written: {error}", "a writable folder with room",
                        "write the diff elsewhere: run migrate without --write, and patch") from None
