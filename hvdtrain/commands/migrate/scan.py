"""Look-ups in a syntax tree by place and by name, which imports and single assignments define."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeVar

import libcst as cst
from libcst import metadata

N = TypeVar("N", bound=cst.CSTNode)


class Tree:
    """Look-ups by place. ``module``: the tree that all nodes of the methods belong to."""

    def __init__(self, module: cst.Module) -> None:
        self.module = module
        self._places = metadata.MetadataWrapper(module, unsafe_skip_copy=True).resolve(metadata.PositionProvider)
        self.nodes: list[Any] = []
        self.parent: dict[cst.CSTNode, cst.CSTNode] = {}
        self._of_kind: dict[type, list[Any]] = {}
        self._end: dict[cst.CSTNode, int] = {}
        self._index: dict[cst.CSTNode, int] = {}
        todo: list[tuple[cst.CSTNode, bool]] = [(module, False)]
        while todo:  # in the order of the text; by a stack, since trees can be deep
            node, left = todo.pop()
            if left:
                self._end[node] = len(self.nodes)
                continue
            self._index[node] = len(self.nodes)
            self.nodes.append(node)
            todo.append((node, True))
            for child in reversed(node.children):
                self.parent[child] = node
                todo.append((child, False))

    def all(self, kind: type[N], within: cst.CSTNode | None = None) -> Iterator[N]:
        """Return nodes of a kind in the order of the text; ``within``: in that node only."""
        if within is not None:
            return (node for node in self.inner(within) if isinstance(node, kind))
        if kind not in self._of_kind:
            self._of_kind[kind] = [node for node in self.nodes if isinstance(node, kind)]
        return iter(self._of_kind[kind])

    def inner(self, node: cst.CSTNode) -> list[Any]:
        """Return all nodes in ``node``, itself first."""
        return self.nodes[self._index[node]:self._end[node]]

    def inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        return node is outer or any(up is outer for up in self.above(node))

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the parent, its parent, ... up to the module."""
        while node in self.parent:
            node = self.parent[node]
            yield node

    def line(self, node: cst.CSTNode) -> int:
        """Return the line of the first token, from 1."""
        return self._places[node].start.line if node in self._places else 1

    def width(self, call: cst.Call) -> int:
        """Return the columns from the indentation of the statement to behind the opening parenthesis."""
        whole = self.statement(call)
        if whole not in self._places or self._places[call.func].end.line != self._places[whole].start.line:
            return 8
        return self._places[call.func].end.column + 1 - self._places[whole].start.column

    def code(self, node: cst.CSTNode) -> str:
        """Return the text without the spaces and comments around it."""
        return self.module.code_for_node(node).strip()

    def short(self, node: cst.CSTNode, most: int = 60) -> str:
        """Return the text on one line, cut to ``most`` characters."""
        text = " ".join(self.code(node).split()).rstrip(",")
        return text if len(text) <= most else text[:most - 3] + "..."

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the statement that ``node`` belongs to: a line, or a compound such as ``if`` (not an ``else``)."""
        for up in (node, *self.above(node)):
            if isinstance(up, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
                return up
        return node

    def scope(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the function that ``node`` stands in, or the module."""
        return next((up for up in self.above(node) if isinstance(up, (cst.FunctionDef, cst.Lambda))), self.module)


class Scan(Tree):
    """Look-ups by place and by name."""

    def binders(self, name: str, at: cst.CSTNode) -> list[cst.CSTNode]:
        """Return what binds the name that is read at ``at``: in the innermost scope around it that binds it at all."""
        scope = self.scope(at)
        while True:
            found = [node for node in self._binders.get(name, ()) if self.scope(node) is scope]
            if found or scope is self.module:
                return found
            scope = self.scope(scope)

    @cached_property
    def _binders(self) -> dict[str, list[cst.CSTNode]]:
        found: dict[str, list[cst.CSTNode]] = {}
        for node in self.nodes:
            if isinstance(node, cst.Name) and self.is_target(node):
                found.setdefault(node.value, []).append(node)
            elif isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.Param)):
                found.setdefault(node.name.value, []).append(node)
            elif isinstance(node, cst.ImportAlias):
                found.setdefault(local_name(node), []).append(node)
        return found

    @cached_property
    def _imported(self) -> list[tuple[str, str, str]]:
        """Return (local name, its meaning, what was imported) of each absolute import; no local name for ``*``."""
        found: list[tuple[str, str, str]] = []
        for node in self.all(cst.Import):
            for alias in node.names:
                local, dotted = local_name(alias), name_of(alias.name) or ""
                found.append((local, dotted if alias.asname else local, dotted))
        for start in self.all(cst.ImportFrom):
            base = None if start.relative else name_of(start.module)
            if base is not None:
                aliases = [] if isinstance(start.names, cst.ImportStar) else start.names
                named = [(local_name(alias), f"{base}.{name_of(alias.name)}") for alias in aliases]
                found += [(local, dotted, dotted) for local, dotted in named or [("", base)]]
        return found

    @cached_property
    def imports(self) -> dict[str, str]:
        """Return the dotted name by local name, anywhere in the file (``nn`` -> ``torch.nn``)."""
        return {local: meaning for local, meaning, _ in self._imported if local}

    def imports_any(self, *roots: str) -> bool:
        """Return whether a module of one of these names, or below it, is imported."""
        return any(f"{name}.".startswith(f"{root}.") for _, _, name in self._imported for root in roots)

    def dotted(self, node: cst.CSTNode) -> str:
        """Return the meaning of a chain of names by the imports (``hvd.rank`` -> ``horovod.torch.rank``), or ""."""
        text = name_of(node)
        head, _, rest = (text or "").partition(".")
        if head not in self.imports:
            return ""
        return self.imports[head] + ("." + rest if rest else "")

    def means(self, node: cst.CSTNode, *ends: str) -> bool:
        """Return whether `dotted` of ``node`` is one of these names, or ends with ``.name`` of one."""
        dotted = self.dotted(node)
        return bool(dotted) and any(dotted == end or dotted.endswith("." + end) for end in ends)

    def calls(self, *ends: str, within: cst.CSTNode | None = None) -> Iterator[cst.Call]:
        """Return calls of what `means` one of these names."""
        return (call for call in self.all(cst.Call, within) if self.means(call.func, *ends))

    def methods(self, *names: str, within: cst.CSTNode | None = None) -> Iterator[cst.Call]:
        """Return calls of an attribute of these names, of anything: ``x.name(...)``."""
        return (call for call in self.all(cst.Call, within)
                if isinstance(call.func, cst.Attribute) and call.func.attr.value in names)

    @property
    def bound(self) -> set[str]:
        """Return every name that the file binds: imports, targets, parameters, functions, classes."""
        return set(self._binders)

    def is_target(self, node: cst.Name) -> bool:
        """Return whether an assignment, ``for``, ``with``, ``except`` or ``:=`` binds ``node``."""
        inner: cst.CSTNode = node
        for up in self.above(node):
            if isinstance(up, (cst.Tuple, cst.List, cst.Element, cst.StarredElement)):
                inner = up
                continue
            if isinstance(up, (cst.For, cst.CompFor, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
                return inner is up.target
            return isinstance(up, (cst.AssignTarget, cst.AsName))
        return False

    @cached_property
    def _assigned(self) -> dict[str, list[cst.Assign]]:
        found: dict[str, list[cst.Assign]] = {}
        for node in self.all(cst.Assign):
            name = name_of(node.targets[0].target)
            if len(node.targets) == 1 and name is not None:
                found.setdefault(name, []).append(node)
        return found

    def assigned(self, name: str) -> list[cst.Assign]:
        """Return plain assignments whose only target is the name (or dotted text) ``name``."""
        return self._assigned.get(name, [])

    def bindings(self, name: str) -> int:
        """Return how often anything but an import binds the plain name."""
        return sum(not isinstance(node, cst.ImportAlias) for node in self._binders.get(name, ()))

    def value(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Return what a name stands for where it is bound once, by one plain assignment; else ``node`` itself."""
        for _ in range(4):
            text = name_of(node)
            if not isinstance(node, cst.Name) or text is None:
                return node
            found = self.assigned(text)
            if len(found) != 1 or self.bindings(text) != 1:
                return node
            node = found[0].value
        return node

    @cached_property
    def _uses(self) -> dict[str, list[cst.Name]]:
        found: dict[str, list[cst.Name]] = {}
        for node in self.all(cst.Name):
            if not self.is_target(node) and not self._is_label(node):
                found.setdefault(node.value, []).append(node)
        return found

    def uses(self, name: str) -> list[cst.Name]:
        """Return the reads of a plain name: not bound, not an attribute, a keyword or part of an import."""
        return self._uses.get(name, [])

    def _is_label(self, node: cst.Name) -> bool:
        """Return whether ``node`` is an attribute, a keyword, or the name of a definition or import."""
        up = self.parent.get(node)
        if isinstance(up, cst.Attribute) and up.attr is node:
            return True
        if isinstance(up, cst.Arg):
            return up.keyword is node
        if isinstance(up, (cst.Param, cst.FunctionDef, cst.ClassDef)):
            return up.name is node
        while isinstance(up, cst.Attribute):
            up = self.parent[up]
        return isinstance(up, (cst.ImportAlias, cst.ImportFrom))


def name_of(node: cst.CSTNode | None) -> str | None:
    """Return ``a`` or ``a.b.c`` as text; None for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = name_of(node.value)
        return None if base is None else f"{base}.{node.attr.value}"
    return None


def local_name(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds."""
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return (name_of(alias.name) or "").split(".")[0]


def argument(call: cst.Call, name: str, position: int | None = None) -> cst.Arg | None:
    """Return the argument ``name``, by keyword or else at ``position``; None if it is not given."""
    for index, arg in enumerate(call.args):
        if arg.keyword is not None and arg.keyword.value == name:
            return arg
        if arg.keyword is None and not arg.star and index == position:
            return arg
    return None


def starred(call: cst.Call) -> bool:
    """Return whether some arguments are in ``*args`` or ``**kwargs``, where they cannot be read."""
    return any(arg.star for arg in call.args)


def is_true(arg: cst.Arg | None) -> bool:
    return arg is not None and isinstance(arg.value, cst.Name) and arg.value.value == "True"


def is_false(arg: cst.Arg | None) -> bool:
    return arg is not None and isinstance(arg.value, cst.Name) and arg.value.value == "False"


def text_of(node: cst.BaseExpression | None) -> str | None:
    """Return the value of a plain string literal, else None."""
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None
