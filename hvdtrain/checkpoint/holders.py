"""Which rank has which array of a model that is cut over ranks, and of its optimizer's state.

Owns the answer who gives an array to a checkpoint and who wants it back. An array is known by its name in the whole
model, so that a checkpoint of any cut fits any other, and the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Control, ModelState
from hvdtrain.core.protocols.run import Head, Window

_PLACE = re.compile(r"\d{5}(?=/)")
"""What stands before the path of a Keras variable: its place among those of the whole model."""

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that wrappers of PyTorch (DataParallel, torch.compile) add; older checkpoints hold them."""

Keys = dict[str, list[str]]
"""By group: a key for each array."""


def key(name: str) -> str:
    """Return what tells an array from the others of its group: of a Keras variable its place alone, which decides."""
    found = _PLACE.match(name)
    return found[0] if found else name


def fitting(own: Iterable[str], kept: Iterable[str]) -> dict[str, str]:
    """Return the own name of each name in ``kept`` that is an own one with other wrappers around it. Pure.

    A name that is an own one, and one that could be several, stay as they are.

    >>> fitting(["module.w", "b"], ["_orig_mod.module.w", "b"])
    {'_orig_mod.module.w': 'module.w'}
    """
    own, kept = set(own), set(kept)
    ways: dict[str, tuple[list[str], list[str]]] = {}
    for side, names in enumerate((own - kept, kept - own)):
        for name in sorted(names):
            bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            ways.setdefault(bare, ([], []))[side].append(name)
    return {theirs[0]: ours[0] for ours, theirs in ways.values() if len(ours) == len(theirs) == 1}


class Holders:
    """``keys_P``: of the arrays of each rank; ``params_P``: the names of each rank's parameters."""

    def __init__(self, rank: int, keys_P: Sequence[Keys], params_P: Sequence[Collection[str]]) -> None:
        self._ranks: dict[tuple[str, str], list[int]] = {}
        for holder, keys in enumerate(keys_P):
            for group, names in keys.items():
                for name in names:
                    self._ranks.setdefault((group, name), []).append(holder)
        self._rank = rank
        self._own = set(params_P[rank])
        self._all = {name for names in params_P for name in names}

    def ranks(self, group: str, name: str) -> list[int]:
        """Return the ranks that have an array, ascending; the first speaks for it."""
        return self._ranks[group, key(name)]

    def mine(self, head: Head) -> bool:
        """Return whether this rank needs an array of a checkpoint.

        Of an optimizer that has made no state yet, what is called after a parameter is for those that have it.
        """
        ranks = self._ranks.get((head.group, key(head.name)))
        if ranks is not None:
            return self._rank in ranks
        owner = head.name.rpartition("/")[0]
        return head.group == "optimizer" and (owner in self._own or owner not in self._all)

    def check(self, heads: Sequence[Head]) -> None:
        """Raise `UserError` where a checkpoint's model is another than that of all ranks together."""
        own = {name for group, name in self._ranks if group == "model"}
        kept = {key(head.name): head.name for head in heads if head.group == "model"}
        missing, extra = sorted(own - set(kept)), sorted(kept[name] for name in set(kept) - own)
        if missing or extra:
            raise UserError(f"the checkpoint's model lacks {missing[:3]} and has {extra[:3]} besides",
                            f"the {count(len(own), 'tensor')} of this model",
                            "resume with the model and optimizer of that run")


def holders_of(control: Control, state: ModelState, params: Collection[str]) -> Holders:
    """Find out who has what; collective. Copies no array."""
    rows = control.gather((_keys(state), sorted(params)))
    return Holders(control.rank, [keys for keys, _ in rows], [names for _, names in rows])


def _keys(state: ModelState) -> Keys:
    return {group: [key(name) for name in arrays] for group, arrays in _named(state).items()}


def model_names(state: ModelState) -> list[str]:
    """Return what a checkpoint calls the tensors of this rank's model. Copies no array."""
    return list(_named(state)["model"])


def _named(state: ModelState) -> Mapping[str, Mapping[str, Any]]:
    groups, _ = state.state(lambda group, name, shape, dtype: Window(0, np.empty(0, dtype)))
    return groups
