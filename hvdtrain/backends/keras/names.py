"""Names of a Keras model's variables that are the same in every process.

A name is the variable's path, ``mlp/dense_0/linear/kernel``, with Keras' own counters begun at their least.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_COUNTED = re.compile(r"^(.*?)(?:_(\d+))?$")
"""A layer's name and the counter that Keras has put behind it; the first of a kind has none."""


def stable_names(variables: Sequence[Any]) -> list[str]:
    """One name for each variable, all different, without dots (which PyTorch reads as the way to a submodule).

    Keras numbers the layers of a process, not of a model: ``dense_7`` and ``dense_8`` are the first two of a model
    that is built late. Of layers of one parent whose names differ in such a number alone, the least loses it and the
    others count from there; where there is none or 0 already (conv_0), names stay as they are.
    """
    least: dict[tuple[str, str], int] = {}
    paths = [variable.path.split("/") for variable in variables]
    for parts in paths:
        for depth, part in enumerate(parts):
            stem, number = _split(part)
            key = (_parent(parts, depth), stem)
            least[key] = min(number, least.get(key, number))
    names: list[str] = []
    for parts in paths:
        found = [_renumbered(p, least[_parent(parts, d), _split(p)[0]]) for d, p in enumerate(parts)]
        name, n = "/".join(found).replace(".", "_"), 1
        while name in names:
            n, name = n + 1, f"{name.partition('#')[0]}#{n + 1}"
        names.append(name)
    return names


def _parent(parts: list[str], depth: int) -> str:
    """Where a part stands: its parents as Keras spells them."""
    return "/".join(parts[:depth])


def _split(part: str) -> tuple[str, int]:
    """("dense", 7) of dense_7, ("dense", 0) of dense."""
    found = _COUNTED.match(part)
    assert found is not None
    return found[1], int(found[2] or 0)


def _renumbered(part: str, least: int) -> str:
    """``part`` with its number less ``least``."""
    stem, number = _split(part)
    if least == 0:
        return part
    return stem if number == least else f"{stem}_{number - least}"
