"""Settings of ranks by the name of their host or device, so that they hold whatever ranks there are.

Owns the text form ``fast=3,old=1``, what a name means, and the way from names to one value per rank; pure. Used for
keys whose type is a mapping of names (`hvdtrain.config.schema.by_name`).

A name means a rank, the first of these that fits it counts: its host, by full or short name; its device's whole name;
words of that name in a row, such as H200 in NVIDIA H200; its device's kind (cpu, cuda, rocm; gpu for either of the
latter); ``*``, the rest. Letters' case does not matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hvdtrain.core.errors import UserError, nearest

T = TypeVar("T")

REST = "*"
WORDS = ("host", "device", "part of a device's name", "device kind", "rest")
"""What a name can be, the more particular first."""


@dataclass(frozen=True)
class RankPlace:
    """Host of a rank, and its device's kind and name."""

    node: str
    kind: str
    device: str

    def __str__(self) -> str:
        return f"{self.node} ({self.kind} {self.device})"


def entries(text: str) -> dict[str, str] | None:
    """Return the names and values, as texts, of ``fast=3,old=1``; None for a text of another form.

    Errors: `UserError` for an entry without a name or a value, and for a name twice.
    """
    if "=" not in text or text.lstrip()[:1] in ("{", "["):
        return None
    found: dict[str, str] = {}
    for entry in text.split(","):
        name, equals, value = (part.strip() for part in entry.rpartition("="))
        if not (name and equals and value):
            raise UserError(f"{text!r} has the entry {entry!r}", "NAME=VALUE, several with commas between",
                            "write for example fast=3,old=1")
        if name in found:
            raise UserError(f"{text!r} names {name!r} twice", "each name once", "leave one of them out")
        found[name] = value
    return found


def as_yaml(text: str) -> str:
    """Return ``fast=3,old=1`` as the YAML mapping that it stands for, and any other text as it is."""
    found = entries(text)
    if found is None:
        return text
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in found.items()) + "}"


def meaning(name: str, place: RankPlace) -> int:
    """Return which of `WORDS` ``name`` is for the rank at ``place``, by number, or -1 if it does not mean it."""
    name, node, device = name.strip().lower(), place.node.lower(), place.device.lower()
    if name == REST:
        return 4
    if name == node or name.partition(".")[0] == node.partition(".")[0] and "." not in (name if "." in node else node):
        return 0
    if name == device:
        return 1
    if name and re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", device):
        return 2
    if name == place.kind or name == "gpu" and place.kind in ("cuda", "rocm"):
        return 3
    return -1


def by_rank(key: str, given: Mapping[str, T], places: Sequence[RankPlace], rest: T | None = None) -> list[T]:
    """Return the value of each rank. Pure.

    ``key``: the setting's name, for messages. ``rest``: of ranks that nothing names; None: that is an error.
    Errors: `UserError` for a rank that two names of one kind mean with other values, and for one that none means.
    """
    found: list[T] = []
    for rank, place in enumerate(places):
        ranked = sorted((meaning(name, place), name) for name in given if meaning(name, place) >= 0)
        best = [name for kind, name in ranked if kind == ranked[0][0]]
        if len({repr(given[name]) for name in best}) > 1:
            raise UserError(f"{key} has different values for rank {rank} on {place} by "
                            f"{' and by '.join(map(repr, best))}",
                            f"one {WORDS[ranked[0][0]]} that matches the rank", "name its host, or leave one out")
        if not best and rest is None:
            raise UserError(f"{key} has no entry for rank {rank} on {place}",
                            nearest(next(iter(absent(given, places)), ""), [*_names(places), REST]),
                            f"add that host or device, or {REST!r} for the rest")
        found.append(given[best[0]] if best else rest)  # type: ignore[arg-type]
    return found


def absent(given: Mapping[str, Any], places: Sequence[RankPlace]) -> list[str]:
    """Return names that mean no rank: a host that is away, or a name that is misspelt. Pure."""
    return [name for name in given if name != REST and all(meaning(name, place) < 0 for place in places)]


def _names(places: Sequence[RankPlace]) -> list[str]:
    """Return the names of hosts and devices of this job."""
    return list(dict.fromkeys(name for place in places for name in (place.node, place.kind, place.device)))
