"""Find what a user names as ``module:callable`` or ``path/to/file.py:callable``, and the paths of a configuration.

Owns the directory that relative paths start from, the import of user code, and the messages about what is missing. Runs
code the user asked to run, nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.core import torchvision_parts
from hvdtrain.core.errors import UserError, nearest

_LOADING = threading.RLock()  # a user's file may load another
_start = ""


@contextlib.contextmanager
def paths_from(directory: str) -> Iterator[None]:
    """Take relative paths from ``directory`` within, also where user code has changed the current directory."""
    global _start
    before, _start = _start, directory
    try:
        yield
    finally:
        _start = before


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` or ``file:///a/b`` as an absolute path, from the directory of `paths_from` or the current one."""
    return Path(os.path.abspath(os.path.join(_start, os.fspath(path).removeprefix(_FILE))))


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://", re.ASCII)
"""Two characters at least: ``C://`` is a drive of Windows."""

_FILE = "file://"

_SECRETS = ((re.compile(r"://[^\s/@:]*:[^\s@]*@"), "://***@"), (re.compile(r"\?[^\s'\")]+"), "?***"))


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path means storage that fsspec opens: ``s3://bucket/run``; ``file://`` is a local path."""
    text = os.fspath(path)
    return bool(_URL.match(text)) and not text.startswith(_FILE)


def redacted(text: str) -> str:
    """Return ``text`` without the credentials and query strings of URLs in it."""
    for pattern, mark in _SECRETS:
        text = pattern.sub(mark, text)
    return text


def check_url(key: str, path: str | os.PathLike[str]) -> None:
    """Raise `UserError` for a URL that cannot be a run's directory; a local path passes."""
    text = os.fspath(path)
    scheme, _, rest = text.partition("://")
    if text.startswith(_FILE) and not rest.startswith("/"):
        raise UserError(f"{key} is {text!r}", "file:///absolute/path", f"correct {key}")
    if not is_url(text):
        return
    if not rest.strip("/"):
        raise UserError(f"{key} is {text}", f"a folder, such as {scheme}://bucket/run", f"correct {key}")
    if "::" in text:
        raise UserError(f"{key} is a chained URL, {redacted(text)}", "one storage such as s3://bucket/run",
                        f"correct {key}")
    user, _, host = rest.partition("/")[0].rpartition("@")
    _, colon, port = host.rpartition(":")
    if ":" in user or colon and not port.isdigit() or "?" in rest:
        raise UserError(f"{key} is a URL of {scheme}:// that holds credentials or a query", "a URL without them: "
                        "configurations are written to disk and into logs", "give credentials as the storage's own "
                        "environment variables or files, such as AWS_ACCESS_KEY_ID")


def load_callable(text: str, key: str) -> Callable[..., Any]:
    """Return the callable ``text`` names, first in the current directory; `UserError` naming ``key`` if none."""
    where, _, attribute = text.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{key} is {text!r}", "module:callable or path/file.py:callable",
                        f"name the callable after a colon in {key}")
    module = load_module(where, key)
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(
            f"{key} {text!r}: {where} has no callable {attribute!r}",
            nearest(attribute, names) if names else "one defined there",
            f"correct {key}",
        )
    return found


def load_module(where: str, key: str) -> ModuleType:
    """Import a module by dotted name or by the path of a ``.py`` file."""
    torchvision_parts.use()
    if where.endswith(".py"):
        return _load_file(Path(where), key)
    if not all(part.isidentifier() for part in where.split(".")):
        raise UserError(f"{key}: {where!r} is no module name", "a dotted module name, or a file that ends in .py",
                        f"correct {key}")
    here = str(absolute(""))
    if here not in sys.path and ("" not in sys.path or here != str(Path.cwd())):
        sys.path.insert(0, here)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or where
        if where == missing or where.startswith(missing + "."):
            raise UserError(
                f"{key}: there is no module {where!r} in the current directory or among the installed packages",
                "a module that can be imported",
                "check the name, or give the file as path/file.py:callable",
            ) from None
        raise _lacking(where, missing, key) from None
    except SyntaxError as error:
        raise _unreadable(error, key) from None


def _unreadable(error: SyntaxError, key: str) -> UserError:
    return UserError(f"{key}: {error.filename}, line {error.lineno}: {error.msg}", "a file that Python can read",
                     "correct that line")


def not_installed(what: str, package: str, extra: str) -> UserError:
    """Return the error for an optional ``package`` that ``what`` needs and ``extra`` of setup.cfg installs."""
    return UserError(f"{what} needs {package}, which is not installed", f"{package} installed for this Python",
                     f'run pip install "hvdtrain[{extra}]"')


def _lacking(where: object, missing: str, key: str) -> UserError:
    package = missing.partition(".")[0]
    extra = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}.get(package)
    remedy = f'run pip install "hvdtrain[{extra}]"' if extra else f"run `pip install {package}`"
    return UserError(f"{key}: importing {where} needs {missing!r}, which is not installed", f"{missing} installed",
                     remedy)


def _load_file(path: Path, key: str) -> ModuleType:
    """Import one file under a name made from its path, once."""
    full = absolute(path).resolve()
    if not full.is_file():
        raise UserError(f"{key}: there is no file {path}", "an existing .py file", f"correct the path in {key}")
    name = f"hvdtrain_user_{full.stem}_{zlib.crc32(os.fsencode(full)):08x}"
    with _LOADING:  # of threads, the second would find a module that has run half
        return sys.modules[name] if name in sys.modules else _run_file(full, name, path, key)


def _run_file(full: Path, name: str, path: Path, key: str) -> ModuleType:
    """Run a file as module ``name``; ``path``: how the user wrote it."""
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None, f"no loader for {full}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(full.parent))  # so that the file finds its neighbours, as a script would
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ModuleNotFoundError) and error.name:
            raise _lacking(path, error.name, key) from None
        if isinstance(error, SyntaxError):
            raise _unreadable(error, key) from None
        raise
    return module


@lru_cache(maxsize=None)
def in_slot(package: str, function: str) -> tuple[str, ...]:
    """Return the names of the files in ``package`` that have ``function``; imports them."""
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    return tuple(n for n in names if hasattr(importlib.import_module(f"{package}.{n}"), function))


def load_slot(package: str, name: str, key: str, function: str) -> Callable[..., Any]:
    """Return ``function`` of file ``name`` in ``package``, or ``name``'s callable; `UserError` naming ``key``."""
    if ":" in name:
        return load_callable(name, key)
    built_in = in_slot(package, function)
    if name not in built_in:
        raise UserError(f"{key} is {name!r}", f"{nearest(name, built_in)}, or module:callable", f"correct {key}")
    return getattr(importlib.import_module(f"{package}.{name}"), function)


def completed(made: Any, defaults: type) -> Any:
    """Give ``made``, which code of a user's made, the public members of ``defaults`` that it does not declare."""
    for name, value in vars(defaults).items():
        if not name.startswith("_") and not hasattr(made, name):
            give(made, name, value)
    return made


def give(made: Any, name: str, value: Any) -> None:
    """Set ``name`` of ``made`` to ``value`` of a class, or of its class where ``made`` is frozen or has slots."""
    try:
        setattr(made, name, value.__get__(made) if callable(value) else value)
    except AttributeError:  # FrozenInstanceError is one
        setattr(type(made), name, value)


def ask(package: str, function: str, *values: Any) -> Any:
    """Return what ``function`` of the folder ``package`` says of ``values``.

    For `hvdtrain.config`, whose keys name files of folders that read the configuration: it must not import them.
    """
    return getattr(importlib.import_module(package), function)(*values)
