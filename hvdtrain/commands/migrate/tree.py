"""Look up nodes of a syntax tree by place: where one stands, who holds whom, its text.

Does not change a tree, does not know what a name means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import libcst as cst
from libcst import metadata

N = TypeVar("N", bound=cst.CSTNode)


class Tree:
    """Look-ups in one module. ``module``: the tree all nodes given to and by the methods belong to."""

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
        """Nodes of a kind in the order of the text; ``within``: in that node only."""
        if within is not None:
            return (node for node in self.inner(within) if isinstance(node, kind))
        if kind not in self._of_kind:
            self._of_kind[kind] = [node for node in self.nodes if isinstance(node, kind)]
        return iter(self._of_kind[kind])

    def inner(self, node: cst.CSTNode) -> list[Any]:
        """All nodes in ``node``, itself first."""
        return self.nodes[self._index[node]:self._end[node]]

    def inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Whether ``node`` is ``outer`` or stands in it."""
        return node is outer or any(up is outer for up in self.above(node))

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Parent, its parent, ... up to the module."""
        while node in self.parent:
            node = self.parent[node]
            yield node

    def line(self, node: cst.CSTNode) -> int:
        """Line of its first token, from 1."""
        return self._places[node].start.line if node in self._places else 1

    def width(self, call: cst.Call) -> int:
        """Columns from the indentation of its statement to behind its opening parenthesis."""
        whole = self.statement(call)
        if whole not in self._places or self._places[call.func].end.line != self._places[whole].start.line:
            return 8
        return self._places[call.func].end.column + 1 - self._places[whole].start.column

    def code(self, node: cst.CSTNode) -> str:
        """Its text, without the spaces and comments around it."""
        return self.module.code_for_node(node).strip()

    def short(self, node: cst.CSTNode, most: int = 60) -> str:
        """Its text on one line, cut to ``most`` characters."""
        text = " ".join(self.code(node).split()).rstrip(",")
        return text if len(text) <= most else text[:most - 3] + "..."

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement that ``node`` belongs to: a line, or a compound such as ``if`` (not an ``else``)."""
        for up in (node, *self.above(node)):
            if isinstance(up, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
                return up
        return node

    def scope(self, node: cst.CSTNode) -> cst.CSTNode:
        """The function that ``node`` stands in, or the module."""
        return next((up for up in self.above(node) if isinstance(up, (cst.FunctionDef, cst.Lambda))), self.module)
