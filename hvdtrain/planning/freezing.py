"""Patterns of the key ``freeze``: the tensors that they keep from training, and for how many epochs.

Pure functions of names; backends freeze layers, at epochs by `hvdtrain.engine.callbacks.freeze`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from hvdtrain.core.errors import UserError, nearest

ALWAYS = math.inf
"""Epochs of what stays frozen for the whole run."""

Freeze = Sequence[str] | Mapping[str, int]
"""A value of the key: patterns of what is never trained, or pattern -> epochs after which it is trained."""


def unfreezing(freeze: Freeze) -> tuple[int, ...]:
    """Return the epochs at whose start something is unfrozen, counted from 0."""
    return tuple(sorted({int(epochs) for epochs in _epochs(freeze).values() if 0 < epochs < ALWAYS}))


def epochs_frozen(freeze: Freeze, trained: Collection[str], other: Collection[str] = ()) -> dict[str, float]:
    """Return for how many epochs each tensor stays frozen, by name: 0 where no pattern matches, `ALWAYS`.

    Of several patterns that match, the smallest number counts. A pattern matches names, and modules with all that is in
    them. ``trained``: parameters; ``other``: buffers, such as statistics of BatchNorm.
    Errors: `UserError` for a pattern that matches nothing, and where nothing is left to train.

    >>> epochs_frozen({"body": 2, "*.bias": 1}, ["body.weight", "body.bias", "head.weight"])
    {'body.weight': 2, 'body.bias': 1, 'head.weight': 0}
    """
    patterns, names = _epochs(freeze), (*trained, *other)
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise UserError(f"freeze has {pattern!r}, which matches no parameter of the model",
                            nearest(pattern, [*modules(names), *names]), "correct the pattern")
    found = {name: min((epochs for pattern, epochs in patterns.items() if matches(pattern, name)), default=0)
             for name in names}
    if trained and all(found[name] for name in trained):
        raise UserError("freeze leaves nothing to train at the start", "some parameters that no pattern matches, or "
                        "with 0 epochs, such as head=0", "freeze fewer layers")
    return found


def matches(pattern: str, name: str) -> bool:
    """Return whether ``pattern``, with the wildcards of a shell, matches ``name`` or a module that holds it."""
    pattern = pattern.replace("/", ".")
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def modules(names: Collection[str]) -> list[str]:
    """Return the names of the modules that hold tensors of ``names``, the outer ones first.

    >>> modules(["body.0.weight", "body.0.bias", "head.weight"])
    ['body', 'head', 'body.0']
    """
    parts = [name.split(".")[:-1] for name in names]
    found = dict.fromkeys((".".join(path[:i]) for path in parts for i in range(1, len(path) + 1)))
    return sorted(found, key=lambda name: name.count("."))


def _epochs(freeze: Freeze) -> dict[str, float]:
    return dict(freeze) if isinstance(freeze, Mapping) else dict.fromkeys(freeze, ALWAYS)
