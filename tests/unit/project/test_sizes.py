"""Sizes that keep a reader's overview, of the package and of its tests: methods, lines of functions and files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(hvdtrain.__file__).parent
METHODS, FUNCTION_LINES, FILE_LINES = 20, 60, 400
FLAT_LISTS = {"Ops"}
"""A backend's array functions, which are one list without a state of their own."""


def trees() -> Iterator[tuple[str, str, ast.Module]]:
    """(path, text, tree) of every file of the package and of tests/."""
    for path in sorted([*ROOT.rglob("*.py"), *(ROOT.parent / "tests").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(ROOT.parent).as_posix(), text, ast.parse(text)


def methods(node: ast.ClassDef) -> set[str]:
    """Names that a class's body defines as functions, ``__init__`` and properties among them."""
    return {inner.name for inner in node.body if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))}


def too_large(name: str, text: str, tree: ast.Module) -> Iterator[str]:
    """Yield what in a file is beyond a limit, in words."""
    if text.count("\n") > FILE_LINES:
        yield f"{name} has {text.count(chr(10))} lines, at most {FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and len(methods(node)) > METHODS and node.name not in FLAT_LISTS:
            yield f"{name}: class {node.name} has {len(methods(node))} methods, at most {METHODS}"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{name}: function {node.name} has {lines} lines, at most {FUNCTION_LINES}"


def test_no_file_of_the_package_or_its_tests_exceeds_a_limit():
    assert [words for each in trees() for words in too_large(*each)] == []


@pytest.mark.parametrize("text, words", [
    ("class A:\n" + "".join(f"    def m{i}(self): pass\n" for i in range(METHODS + 1)), "class A has 21 methods"),
    ("def f():\n" + "    pass\n" * FUNCTION_LINES, "function f has 61 lines"),
    ("\n" * (FILE_LINES + 1), "x.py has 401 lines"),
])
def test_what_is_beyond_a_limit_is_named(text, words):
    found, = too_large("x.py", text, ast.parse(text))
    assert words in found
