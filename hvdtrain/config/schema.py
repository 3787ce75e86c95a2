"""Configuration keys of a tree of dataclasses: names, types as text, and checks of values.

Owns the reading of the dataclasses of `hvdtrain.config` for the command line, the docs and the checks; knows no key.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hvdtrain.config import placed
from hvdtrain.config.sections import is_off
from hvdtrain.core import metric_entries
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import ask

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text",
          dict: "keyword arguments such as {width: 64}"}
_UNIONS = (Union, UnionType)
_NUMBERS = {int: numbers.Integral, float: numbers.Real}


@dataclass(frozen=True)
class Key:
    """A key: dotted ``name``, type ``hint``, ``default``, ``unit`` or "", ``doc``; others: `config.sections.key`."""

    name: str
    hint: Any
    default: Any
    unit: str
    doc: str = ""
    per_rank: bool = False
    affects: str = ""
    quiet: Any = None
    choices: str = ""
    unused: tuple[Any, ...] = ()
    least: float | None = None
    most: float | None = None
    off: Any = None
    auto: Any = None
    aliases: tuple[str, ...] = ()
    alias_sets: Callable[[Any], dict[str, Any]] | None = None

    @property
    def help(self) -> str:
        """Return the meaning with the names of the folder that the key takes."""
        return self.doc.replace("{choices}", ", ".join(ask(self.choices, "choices"))) if self.choices else self.doc


def keys(cls: type) -> tuple[Key, ...]:
    """Return every key below the dataclass ``cls``, with those of its sections, in the order of the fields."""
    return _all_keys(cls)  # type: ignore[arg-type]  # mypy takes the type of a dataclass for unhashable


@lru_cache(maxsize=None)
def _all_keys(cls: type) -> tuple[Key, ...]:
    return tuple(_keys(cls, "", {}))


def _keys(cls: type, prefix: str, section: Mapping[str, Any]) -> list[Key]:
    """Return the keys below ``cls``. ``section``: facts of the field that holds ``cls``, true of its keys too."""
    out: list[Key] = []
    for f, hint in _fields(cls):
        name, meta = prefix + f.name, dict(f.metadata)
        meta["affects"] = meta.get("affects") or section.get("affects", "")
        meta["unused"] = (*meta.get("unused", ()), *(one for one in section.get("unused", ()) if one.but != f.name))
        if dataclasses.is_dataclass(hint):
            out += _keys(hint, f"{name}.", meta)  # type: ignore[arg-type]
        else:
            make: Any = f.default_factory
            default = make() if f.default is dataclasses.MISSING else f.default
            out.append(Key(name, hint, default, **{"unit": "", **meta}))
    return out


def affecting(cls: type, what: str) -> frozenset[str]:
    """Return the keys and whole sections of ``cls`` whose change at a resume alters ``what``."""
    whole = {f.name for f, _ in _fields(cls) if f.metadata.get("affects") == what}
    return frozenset(whole | {key.name for key in keys(cls) if key.affects == what})


def quiet(cls: type) -> dict[str, Any]:
    """Return the keys of ``cls`` that commands which time or compare steps alone set, with the values they get."""
    return {key.name: key.quiet for key in keys(cls) if key.quiet is not None}


def options(values: Mapping[str, Any]) -> list[str]:
    """Return keys and their values as options of the command line."""
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]


def replaced(config: T, values: Mapping[str, Any]) -> T:
    """Return a copy of the dataclass instance ``config`` with other values of its dotted keys."""
    deep: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        deep.setdefault(section, {})[key] = value
    return dataclasses.replace(config, **{  # type: ignore[type-var]
        name: own[""] if "" in own else replaced(getattr(config, name), own) for name, own in deep.items()})


def per_rank(config: DataclassInstance) -> dict[str, Any]:
    """Return the values of the dataclass instance ``config`` whose keys may hold an entry for each rank, by name."""
    names = {key.name for key in keys(type(config)) if key.per_rank}
    return {name: value for name, value in leaves(config) if name in names}


def by_name(hint: Any) -> bool:
    """Return whether a value may be given for names, such as {fast: 3, old: 1}."""
    return get_origin(hint) in _UNIONS and any(get_origin(one) is dict for one in get_args(hint))


def lists_numbers(hint: Any) -> bool:
    """Return whether a value may be a list of numbers."""
    return any(one in (list[float], list[int]) for one in (hint, *get_args(hint)))


def sections(cls: type) -> dict[str, type]:
    """Return the sections of ``cls`` by name: fields that are dataclasses themselves."""
    return {f.name: hint for f, hint in _fields(cls) if isinstance(hint, type) and dataclasses.is_dataclass(hint)}


def off_sections(cls: type) -> dict[str, type]:
    """Return the sections of ``cls`` that a bare off, none or null turns off, to the values of their ``OFF``."""
    return {name: hint for name, hint in sections(cls).items() if hasattr(hint, "OFF")}


@lru_cache(maxsize=None)
def respelled(cls: type) -> tuple[Key, ...]:
    """Return the keys of ``cls`` that take other spellings of their values than those of their type."""
    return tuple(key for key in keys(cls) if key.off is not None or key.auto is not None or _items(key.hint))


def own_value(key: Key, value: Any) -> Any:
    """Return the key's own value for another spelling of it, and any other ``value`` as it is. Pure.

    These are the words off, none, null, 0 and empty; auto, where a number stands for it; and for a list its bare item,
    or several with commas between them.
    """
    of, text = _items(key.hint), isinstance(value, str)
    known = fits(value, key.hint)
    if key.auto is not None and (value is None or text and value.strip().lower() in ("auto", "none", "null", "")):
        return key.auto
    block = of is str and known and text and value.strip() == "0"  # remat: the blocks of a Sequential have such names
    if key.off is not None and is_off(value) and not block:
        return value if known and value == key.off else type(key.off)(key.off)
    if of is None or known:
        return value
    if text and by_name(key.hint) and (named := placed.entries(value)) is not None:
        return {name: int(entry) if entry.isdecimal() else entry for name, entry in named.items()}
    if text and of is str and not value.lstrip().startswith("["):
        return metric_entries.split(value)
    return [value] if of is not str and fits(value, of) else value


@lru_cache(maxsize=None)
def _items(hint: Any) -> type | None:
    """Return the type of the items of a list, None for what cannot be one."""
    return next((get_args(one)[0] for one in (hint, *get_args(hint)) if get_origin(one) is list), None)


def named_sections(cls: type) -> dict[str, type]:
    """Return the sections of ``cls`` that have a ``name``: a bare text stands for it."""
    return {name: hint for name, hint in sections(cls).items() if any(f.name == "name" for f, _ in _fields(hint))}


def bare(cls: type, name: str, value: Any) -> str:
    """Return the key of section ``name`` of ``cls`` that a bare ``value`` sets, "" for none.

    A text is a section's name, a whole number what its ``BARE`` says, such as a pipeline's stages.
    """
    section = sections(cls).get(name)
    if section is None or value is None or value is False:
        return ""
    if isinstance(value, str):
        return "name" if name in named_sections(cls) else ""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return getattr(section, "BARE", "") if whole else ""


def in_words(hint: Any) -> str:
    """Describe values of this type, for a message or a table."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return "one of " + ", ".join(map(str, choices)) if len(choices) > 1 else str(choices[0])
    if get_origin(hint) in _UNIONS:
        return " or ".join(in_words(one) for one in get_args(hint))
    if get_origin(hint) is list:
        (of,) = get_args(hint)
        kinds = {float: "numbers such as [3, 1]", int: "whole numbers such as [64, 16]"}
        return "a list of " + kinds.get(of, "names such as [a, b]")
    if get_origin(hint) is dict:
        return f"{_WORDS[get_args(hint)[1]]} for each name"
    if dataclasses.is_dataclass(hint):
        names = [f.name for f in dataclasses.fields(hint)]
        bare = "a name, or " if "name" in names else "a number, or " if hasattr(hint, "BARE") else ""
        return bare + "a section with " + ", ".join(names)
    return _WORDS[hint]


def fits(value: Any, hint: Any) -> bool:
    """Return whether ``value`` is of this type; a whole number is a number too, true and false are none."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) in _UNIONS:
        return any(fits(value, one) for one in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, (list, tuple)) and all(fits(v, get_args(hint)[0]) for v in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(isinstance(k, str) and k and fits(v, get_args(hint)[1])
                                               for k, v in value.items())
    if hint is dict:
        return isinstance(value, dict) and all(isinstance(k, str) for k in value)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    return isinstance(value, hint)


def check_types(config: DataclassInstance, prefix: str = "") -> None:
    """Raise `UserError` naming the first key of the dataclass instance ``config`` whose value is of another type."""
    for f, hint in _fields(type(config)):
        value = getattr(config, f.name)
        if not fits(value, hint):
            raise UserError(f"{prefix}{f.name} is {shown(value)}", in_words(hint), f"correct {prefix}{f.name}")
        if dataclasses.is_dataclass(hint):
            check_types(value, f"{prefix}{f.name}.")


def leaves(config: DataclassInstance, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every (dotted name, value) of the dataclass instance ``config``."""
    for f, hint in _fields(type(config)):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(hint):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def shown(value: Any, width: int = 60) -> str:
    """Return a value on one line of at most ``width`` characters, as in a YAML file."""
    words = {None: "empty (null)", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # a number of thousands of digits, a list that holds itself
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= width else text[:width - 3] + "..."


@lru_cache(maxsize=None)
def _fields(cls: Any) -> tuple[tuple[dataclasses.Field, Any], ...]:
    hints = get_type_hints(cls)
    return tuple((f, hints[f.name]) for f in dataclasses.fields(cls))  # type: ignore[arg-type]
