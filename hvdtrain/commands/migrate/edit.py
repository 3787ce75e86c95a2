"""Edits of syntax trees that keep the formatting. An edit is planned by node, and `apply` makes all in one pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import libcst as cst

from hvdtrain.commands.migrate.scan import Scan, local_name, name_of

Change = Callable[[Any], Any]
"""From a node, its children already changed, to what stands in its place: a node, several, or none."""


@dataclass
class Edits:
    """Planned rewrite. ``changes``: by node; ``imports``: lines to add; ``first``: statements behind the imports."""

    changes: dict[cst.CSTNode, Change] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)

    def put(self, node: cst.CSTNode, change: Change) -> None:
        """Plan ``change``, after an earlier one of the same node."""
        earlier = self.changes.get(node)
        self.changes[node] = change if earlier is None else lambda new: change(earlier(new))

    def swap(self, node: cst.CSTNode, text: str) -> None:
        self.put(node, lambda old: expression(text, old))

    def remove(self, line: cst.CSTNode) -> None:
        """Plan to remove a statement with the comment right above it; a block with nothing left gets ``pass``."""
        self.put(line, lambda old: Gone(body=[cst.Pass()], leading_lines=_apart(old.leading_lines)))

    def __bool__(self) -> bool:
        return bool(self.changes or self.imports or self.first)


class Gone(cst.SimpleStatementLine):
    """Removed statement, until its block is put together; its comments go to the next one."""


def _apart(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Return the lines above a statement up to the last blank one: what is not about the statement itself."""
    blank = max((i for i, line in enumerate(lines) if line.comment is None), default=-1)
    return list(lines[:blank + 1])


class _Apply(cst.CSTTransformer):
    def __init__(self, changes: dict[cst.CSTNode, Change]) -> None:
        super().__init__()
        self.changes = changes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        made = super().on_leave(original_node, updated_node)
        change = self.changes.get(original_node)
        made = made if change is None else change(made)
        if isinstance(made, (cst.IndentedBlock, cst.Module)) and any(isinstance(s, Gone) for s in made.body):
            return _together(made)
        return made


def _together(block: Any) -> Any:
    """Return a block without its `Gone` statements, whose comments move on to the next statement, or below the last."""
    body: list[Any] = []
    held: list[cst.EmptyLine] = []
    for line in block.body:
        if isinstance(line, Gone):
            held += line.leading_lines
            continue
        body.append(line.with_changes(leading_lines=_joined(held, list(line.leading_lines), not body)))
        held = []
    if not body and isinstance(block, cst.IndentedBlock):
        body = [statement("pass")]
    below = held if any(line.comment for line in held) else []
    return block.with_changes(body=body, footer=[*below, *block.footer])


def _joined(held: list[cst.EmptyLine], own: list[cst.EmptyLine], first: bool) -> list[cst.EmptyLine]:
    """Return the lines above what is left, with those of what went: its comments, or else one run of blank lines."""
    if any(line.comment for line in held):
        return held + own
    if first or own and own[0].comment is None:
        return own
    return held[:2] + own


def apply(scan: Scan, edits: Edits) -> cst.Module:
    """Return the module with the edits made, and without imports that served only what was removed."""
    if not edits:
        return scan.module
    end = _first_change(scan, edits)
    index = _after_imports(scan, end)
    changes = {**edits.changes}
    wanted = sorted(set(edits.imports) - _import_lines(scan), key=lambda line: (not line.startswith("import"), line))
    added = [statement(line) for line in wanted]
    first = [statement(line) for line in edits.first]
    if first:
        first[0] = first[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    where = _after_needed(scan, edits.first, index, end)
    top: list[Any] = []
    for at, lines in ((index, added), (where, first)):
        if at == 0:
            top += lines
        elif lines:
            plan = Edits(changes)
            plan.put(scan.module.body[at - 1], followed_by(lines))
            changes = plan.changes
    module = cast(cst.Module, scan.module.visit(_Apply(changes)))
    if top:
        module = module.with_changes(body=[*top, *module.body])
    return _without_idle_imports(scan, module)


def followed_by(lines: list[Any]) -> Change:
    return lambda node: cst.FlattenSentinel([*_many(node), *lines])


def below(first: Any) -> Change:
    """Return a change that puts the statement ``first`` above a statement, and below its comments."""
    def put(node: Any) -> cst.FlattenSentinel:
        line, *others = _many(node)
        top = first.with_changes(leading_lines=line.leading_lines)
        return cst.FlattenSentinel([top, line.with_changes(leading_lines=[]), *others])

    return put


def _first_change(scan: Scan, edits: Edits) -> int:
    """Return the index of the first statement that is no import and has an edit in it."""
    for index, line in enumerate(scan.module.body):
        if not _is_import(line) and any(node in edits.changes for node in scan.inner(line)):
            return index
    return len(scan.module.body)


def _after_needed(scan: Scan, texts: Sequence[str], index: int, end: int) -> int:
    """Return ``index``, or behind a later import, above ``end``, of what the statements ``texts`` read."""
    read = {node.value for text in texts for node in Scan(cst.parse_module(text)).all(cst.Name)}
    for at in range(index, end):
        names = {local_name(alias) for alias in scan.all(cst.ImportAlias, scan.module.body[at])
                 if scan.scope(alias) is scan.module}
        if names & read:
            index = at + 1
    return index


def _many(node: Any) -> list[Any]:
    if isinstance(node, cst.FlattenSentinel):
        return list(node)
    return [] if isinstance(node, cst.RemovalSentinel) else [node]


def _import_lines(scan: Scan) -> set[str]:
    return {scan.code(node) for node in scan.nodes if isinstance(node, (cst.Import, cst.ImportFrom))
            and scan.parent.get(scan.parent[node]) is scan.module}


def _after_imports(scan: Scan, end: int) -> int:
    """Return the index behind the last top-level import above statement ``end``, or behind the docstring."""
    body = scan.module.body
    for index in range(end, 0, -1):
        if _is_import(body[index - 1]):
            return index
    return 1 if body and _is_docstring(body[0]) else 0


def _is_import(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and any(
        isinstance(small, (cst.Import, cst.ImportFrom)) for small in node.body)


def _is_docstring(node: cst.CSTNode) -> bool:
    return (isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Expr)
            and isinstance(node.body[0].value, (cst.SimpleString, cst.ConcatenatedString)))


def _without_idle_imports(scan: Scan, module: cst.Module) -> cst.Module:
    """Remove top-level imports whose name was read before and is no longer read anywhere."""
    after = Scan(module)
    idle = {name for name in scan.imports if scan.uses(name) and not after.uses(name)}
    exported = {text for node in after.all(cst.SimpleString) if (text := node.evaluated_value)}
    changes: dict[cst.CSTNode, Change] = {}
    for line in module.body:
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
            continue
        node = line.body[0]
        if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
            continue
        if isinstance(node, cst.ImportFrom) and name_of(node.module) == "__future__":
            continue
        names = list(node.names)
        kept = [alias for alias in names if local_name(alias) not in idle or local_name(alias) in exported]
        if not kept:
            changes[line] = lambda old: Gone(body=[cst.Pass()], leading_lines=_apart(old.leading_lines))
        elif len(kept) < len(names):
            kept[-1] = kept[-1].with_changes(comma=names[-1].comma)
            changes[node] = _named(kept)
    return cast(cst.Module, module.visit(_Apply(changes))) if changes else module


def _named(names: Sequence[cst.ImportAlias]) -> Change:
    return lambda new: new.with_changes(names=names)


def expression(text: str, like: cst.BaseExpression | None = None) -> cst.BaseExpression:
    """Parse an expression; with the parentheses of ``like`` where it needs some."""
    node = cst.parse_expression(text)
    if like is not None and getattr(like, "lpar", None) and not node.lpar:
        return node.with_changes(lpar=like.lpar, rpar=like.rpar)
    return node


def statement(text: str) -> Any:
    return cst.parse_statement(text)


def arg(text: str, keyword: str = "") -> cst.Arg:
    """Return an argument, ``keyword=text`` without spaces or ``text``."""
    if not keyword:
        return cst.Arg(expression(text))
    return cst.Arg(expression(text), keyword=cst.Name(keyword), equal=cst.AssignEqual(
        cst.SimpleWhitespace(""), cst.SimpleWhitespace("")))


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    return arg("_", name).with_changes(value=value)


def in_a_row(parts: Sequence[Any]) -> list[Any]:
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [*(p.with_changes(comma=comma) for p in parts[:-1]), parts[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def broken(width: int) -> cst.Comma:
    """Return a comma, a line end, and ``width`` spaces beyond the indentation of the statement."""
    return cst.Comma(whitespace_after=cst.ParenthesizedWhitespace(
        cst.TrailingWhitespace(), indent=True, last_line=cst.SimpleWhitespace(" " * width)))


def _plain(comma: cst.Comma) -> cst.Comma:
    after = comma.whitespace_after
    if isinstance(after, cst.ParenthesizedWhitespace):
        after = after.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
    return cst.Comma(whitespace_after=after)


def comments(nodes: Sequence[cst.CSTNode]) -> list[cst.EmptyLine]:
    """Return the comments in some nodes, a line each."""
    found: list[cst.EmptyLine] = []
    for node in nodes:
        todo: list[cst.CSTNode] = [node]
        while todo:
            inner = todo.pop()
            if isinstance(inner, cst.Comment):
                found.append(cst.EmptyLine(comment=inner))
            todo.extend(reversed(inner.children))
    return found


def with_args(call: cst.Call, args: Sequence[cst.Arg], alone: Sequence[cst.Arg] = (), width: int = 0) -> cst.Call:
    """Return ``call`` with other arguments, separated as before; ``alone``: on own lines, indented by ``width``."""
    if not args:
        return call.with_changes(args=[], whitespace_before_args=cst.SimpleWhitespace(""))
    old = call.args
    commas = [a.comma for a in old[:-1] if isinstance(a.comma, cst.Comma)]
    before = call.whitespace_before_args
    hanging = isinstance(before, cst.ParenthesizedWhitespace)
    apart = [c for c in commas if isinstance(c.whitespace_after, cst.ParenthesizedWhitespace) is hanging]
    between = _plain((apart or commas or [cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))])[0])
    if hanging and not apart:
        between = _plain(cst.Comma(whitespace_after=before))
    last = old[-1] if old else cst.Arg(cst.Name("_"))
    made = []
    for now, following in zip(args, args[1:]):
        comma: Any = now.comma if isinstance(now.comma, cst.Comma) and now.comma is not last.comma else between
        on_its_line = isinstance(comma.whitespace_after, cst.ParenthesizedWhitespace)
        said = _first_line(last) if now.comma is last.comma and now.keyword is last.keyword else None
        if said is not None or any(following is a for a in alone) and not on_its_line:
            line = _plain(cst.Comma(whitespace_after=before)) if hanging else broken(width)
            comma = line if said is None else line.with_changes(
                whitespace_after=line.whitespace_after.with_changes(first_line=said))
        made.append(now.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace("")))
    end, moved = last.comma, args[-1].keyword is not last.keyword
    if moved and isinstance(end, cst.Comma):
        end = _plain(end)
    after = last.whitespace_after_arg
    if moved and isinstance(after, cst.ParenthesizedWhitespace):
        after = after.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
    made.append(args[-1].with_changes(comma=end, whitespace_after_arg=after))
    return call.with_changes(args=made)


def _first_line(last: cst.Arg) -> cst.TrailingWhitespace | None:
    """Return the comment behind the last argument of a call, with its line end; None if there is none."""
    for space in (last.whitespace_after_arg, getattr(last.comma, "whitespace_after", None)):
        if isinstance(space, cst.ParenthesizedWhitespace) and space.first_line.comment is not None:
            return space.first_line
    return None


def with_elements(list_node: cst.List, elements: Sequence[Any], width: int = 0) -> cst.List:
    """Return a list with elements before its own, a line each as it has its own, or else ``width`` spaces in."""
    old = list_node.elements
    before = list_node.lbracket.whitespace_after
    between = next((e.comma for e in old[:-1] if isinstance(e.comma, cst.Comma)
                    and isinstance(e.comma.whitespace_after, cst.ParenthesizedWhitespace)), None)
    if between is None:
        several = isinstance(before, cst.ParenthesizedWhitespace) and bool(old)
        between = cst.Comma(whitespace_after=before) if several else broken(width)
    between = _plain(between)
    if not old:
        return list_node.with_changes(elements=[*(e.with_changes(comma=between) for e in elements[:-1]),
                                                elements[-1]])
    return list_node.with_changes(elements=[*(e.with_changes(comma=between) for e in elements), *old])


def dedent(node: cst.With) -> cst.FlattenSentinel:
    """Return the statements of a ``with`` block in its place; comments above, beside and below it stay."""
    body: list[Any] = list(node.body.body) if isinstance(node.body, cst.IndentedBlock) else [
        cst.SimpleStatementLine(body=node.body.body)]  # type: ignore[arg-type]
    lead = list(node.leading_lines)
    header = getattr(node.body, "header", None)
    if header is not None and header.comment is not None:
        lead.append(cst.EmptyLine(comment=header.comment))
    body[0] = body[0].with_changes(leading_lines=[*lead, *body[0].leading_lines])
    below = [line for line in getattr(node.body, "footer", ()) if line.comment]
    return cst.FlattenSentinel([*body, Gone(body=[cst.Pass()], leading_lines=below)])


def guarded(line: Any, condition: str) -> Any:
    """Return ``if condition:`` around a statement; comments above it stay above."""
    return inside(line, f"if {condition}:")


def inside(line: Any, head: str) -> Any:
    """Return a block that begins with ``head`` around a statement; comments above it stay above."""
    inner = line.with_changes(leading_lines=[])
    made = statement(f"{head}\n    pass")
    return made.with_changes(leading_lines=line.leading_lines, body=cst.IndentedBlock(body=[inner]))


HOMES = {"Config": "hvdtrain", "Trainer": "hvdtrain", "DataConfig": "hvdtrain.config",
         "ExchangeConfig": "hvdtrain.config",
         "Named": "hvdtrain.config", "ScheduleConfig": "hvdtrain.config"}


class Names:
    """Local names of hvdtrain in code that is inserted: ``names["Trainer"]``; ``trainer``: one for a Trainer."""

    def __init__(self, scan: Scan) -> None:
        self.trainer = "trainer" if "trainer" not in scan.bound else "hvd_trainer"
        self._as = {name: name if name not in scan.bound else f"Hvd{name}" for name in HOMES}

    def __getitem__(self, name: str) -> str:
        return self._as[name]

    def imports(self, text: str) -> list[str]:
        """Return the import lines of what ``text`` calls."""
        called = [name for name, local in self._as.items() if re.search(rf"\b{local}\(", text)]
        lines = []
        for module in dict.fromkeys(HOMES.values()):
            said = [name if name == self._as[name] else f"{name} as {self._as[name]}" for name in called
                    if HOMES[name] == module]
            lines += [f"from {module} import {', '.join(said)}"] if said else []
        return lines
