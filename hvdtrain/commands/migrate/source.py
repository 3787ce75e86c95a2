"""Python files: read, parsed, compared, written in one rename."""

from __future__ import annotations

import ast
import difflib
import os
import stat
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.core.errors import UserError

if TYPE_CHECKING:
    import libcst as cst

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
                        "a script that this Python can compile", "mend it; Python 2 goes through 2to3 first")
    try:
        import libcst as cst
    except ModuleNotFoundError:
        raise UserError("migrate needs libcst, which is not installed", "it beside numpy",
                        "run pip install libcst") from None
    try:
        module = cst.parse_module(data)
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise UserError(f"{name} cannot be parsed: {str(error).splitlines()[0]}", "Python that libcst knows",
                        "simplify the statement it names") from None
    except (SyntaxError, UnicodeError) as error:  # compile passes over bytes of a comment
        raise UserError(f"{name} is not Python that can be read: {error}", "UTF-8, or the encoding that the file names",
                        "save it as UTF-8") from None
    if module.bytes != data:  # such as a byte order mark, or a lone carriage return
        raise UserError(f"{name} has bytes that its syntax tree does not give back", "plain Python text",
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
        handle, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(after)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temp, stat.S_IMODE(path.stat().st_mode))
            os.replace(temp, path)
        except BaseException:
            os.unlink(temp)
            raise
    except OSError as error:
        raise UserError(f"{source.name} cannot be written: {error}", "a writable folder with room",
                        "write the diff elsewhere: run migrate without --write, and patch") from None
