"""Names that a program reads where nothing has bound them: what an edit must not leave behind.

Owns the look-up, by Python's own table of scopes, and by lines within one scope. Knows nothing of edits.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator

KNOWN = frozenset({*dir(builtins), "__file__", "__name__", "__doc__", "__builtins__", "__annotations__", "__class__"})


def unbound(data: bytes) -> set[str]:
    """Names that nothing binds in their scope or around it, and names read in lines above the first that binds them.

    A name is told once, however often it is read. A ``from x import *`` may bind anything: then there are none.
    """
    tree = ast.parse(data)
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree)):
        return set()
    table = symtable.symtable(ast.unparse(tree), "script", "exec")  # whatever the encoding of the bytes is
    at_top = {symbol.get_name() for symbol in table.get_symbols() if _binds(symbol)}
    at_top |= {s.get_name() for scope in _scopes(table) for s in scope.get_symbols()
               if s.is_declared_global() and s.is_assigned()}
    missing = {s.get_name() for scope in _scopes(table) for s in scope.get_symbols()
               if s.is_referenced() and (s.is_global() or scope is table) and s.get_name() not in at_top | KNOWN}
    return missing | _too_early(tree)


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from _scopes(inner)


def _binds(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace() or symbol.is_annotated()


def _too_early(tree: ast.Module) -> set[str]:
    """Names that one scope reads above the first line that binds them there; loops are read once, from the top."""
    found: set[str] = set()
    scopes: list[ast.AST] = [tree, *(n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef,
                                                                                 ast.AsyncFunctionDef)))]
    for scope in scopes:
        first: dict[str, tuple[int, int]] = {}
        reads: dict[str, tuple[int, int]] = {}
        for node in _own(scope):
            at = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                reads[node.id] = min(reads.get(node.id, at), at)
            else:
                for name in _bound_by(node):
                    first[name] = min(first.get(name, at), at)
        found |= {name for name, at in reads.items() if name in first and at[0] < first[name][0]
                  and name not in KNOWN and name not in _given(scope)}
    return found


def _given(scope: ast.AST) -> set[str]:
    """Parameters, and names that are declared ``global`` or ``nonlocal``."""
    found: set[str] = {name for node in _own(scope) if isinstance(node, (ast.Global, ast.Nonlocal))
                       for name in node.names}
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        found |= {a.arg for a in ast.walk(scope.args) if isinstance(a, ast.arg)}
    return found


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope's body without those in functions, classes and lambdas inside it."""
    todo: list[ast.AST] = list(getattr(scope, "body", []))
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            todo += node.decorator_list
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            todo.append(node.generators[0].iter)  # its own names are another scope's
        elif not isinstance(node, ast.Lambda):
            todo += ast.iter_child_nodes(node)


def _bound_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ExceptHandler) and node.name:
        return [node.name]
    return []
