"""Finds the file behind a key whose value is a file's name: the built-in ones of a folder, or a user's own.

Owns no key. A user's own is named as ``module:callable`` or ``path/file.py:callable`` (`hvdtrain.core.resolve`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import load_callable


@lru_cache(maxsize=None)
def in_slot(package: str, function: str) -> tuple[str, ...]:
    """Return the names of the files in ``package`` that have ``function``; imports them."""
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    return tuple(n for n in names if hasattr(importlib.import_module(f"{package}.{n}"), function))


def load_slot(package: str, name: str, key: str, function: str) -> Callable[..., Any]:
    """Return ``function`` of the file ``name`` in ``package``, or the callable that ``name`` spells out.

    Errors: `UserError` naming config key ``key`` where there is neither.
    """
    if ":" in name:
        return load_callable(name, key)
    built_in = in_slot(package, function)
    if name not in built_in:
        raise UserError(f"{key} is {name!r}", f"{nearest(name, built_in)}, or module:callable", f"correct {key}")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{package}.{name}"), function)
    return found


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
