"""Offer a training step's state to a checkpoint, as `hvdtrain.core.protocols.run.Stateful`, and take it back.

Owns which rank writes and wants which array. A partitioned model's arrays keep their names in the whole model, so that
a checkpoint of any partition fits any other.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.checkpoint.stream import FIRST
from hvdtrain.checkpoint.transfer import copied_shards, own_group, whole_shards
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Control, ModelState
from hvdtrain.core.protocols.run import ArrayWindow, Given, Head, Place, Read, Shard, Want

Arrays = dict[str, np.ndarray]

LEAST_CUT_BYTES = 1 << 16  # tensors below this size are written whole by one rank


class Replicated:
    """State that every rank holds alike: rank 0 gives all of it."""

    def __init__(self, rank: int, state: Callable[[Place | None], tuple[dict[str, Arrays], dict[str, Any]]],
                 load: Callable[[dict[str, Arrays], dict[str, Any]], None]) -> None:
        self._rank, self._state, self._load = rank, state, load
        self._rest: dict[str, Any] = {}

    def shards(self, place: Place | None = None) -> Iterator[Shard]:
        if self._rank == 0:
            groups, self._rest = self._state(place)
            yield from whole_shards(groups, groups)

    def rest(self) -> dict[str, Any]:
        return self._rest

    def wants(self, heads: Sequence[Head]) -> list[Want]:
        return [_all_of(one) for one in heads if one.group in FIRST]

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        self._load({group: dict(read(group)) for group in FIRST}, dict(rest))
        return ""


class SplitReplicated:
    """State that several ranks hold alike: each gives elements [begin, end) of a tensor, by ``part_of``."""

    def __init__(self, part_of: Callable[[str, str, int, int], tuple[int, int] | None],
                 state: Callable[[Place | None], tuple[dict[str, Arrays], dict[str, Any]]]) -> None:
        self._part_of, self._state = part_of, state
        self._rest: dict[str, Any] = {}

    def shards(self, place: Place | None = None) -> Iterator[Shard]:
        """Yield this rank's shards; ``place`` is asked for the memory of these alone."""
        cuts: dict[tuple[str, str], tuple[tuple[int, ...], int, int]] = {}
        copied: set[tuple[str, str]] = set()

        def window(group: str, name: str, shape: tuple[int, ...], dtype: Any) -> ArrayWindow | None:
            mine = self._part_of(group, name, math.prod(shape), np.dtype(dtype).itemsize)
            if mine is None:
                return ArrayWindow(0, np.empty(0, dtype))
            cuts[group, name] = (shape, *mine)
            memory = None if place is None else place(group, name, (mine[1] - mine[0],), dtype)
            if memory is None:
                return None
            assert not isinstance(memory, ArrayWindow)
            copied.add((group, name))
            return ArrayWindow(mine[0], memory)

        groups, self._rest = self._state(window)
        for (group, name), (shape, begin, end) in cuts.items():
            flat = np.ascontiguousarray(groups[group][name]).reshape(-1)
            yield Shard(group, name, shape, begin, flat if (group, name) in copied else flat[begin:end])

    def rest(self) -> dict[str, Any]:
        return self._rest


class PartitionedModel(SplitReplicated):
    """State of a rank's own blocks. ``among``: ranks share an array's writing; else the lowest gives all."""

    def __init__(self, rank: int, holders: Holders, state: ModelState, among: bool) -> None:
        def part_of(group: str, name: str, n: int, itemsize: int) -> tuple[int, int] | None:
            ranks = holders.ranks(group, name)
            if among:
                return part(group, name, n, itemsize, ranks.index(rank), len(ranks))
            return (0, n) if rank == ranks[0] else None

        super().__init__(part_of, state.state)
        self.holders, self._load = holders, state.load

    def wants(self, heads: Sequence[Head]) -> list[Want]:
        self.holders.check(heads)
        return [_all_of(one) for one in heads if one.group in FIRST and self.holders.mine(one)]

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        self._load({group: dict(read(group)) for group in FIRST}, dict(rest))
        return ""


class ZeroState:
    """State of which a rank holds its model (``model``, ``mine``) and its shards of the optimizer's state."""

    def __init__(self, model: Given, state: ModelState, mine: Callable[[Head], bool] = lambda head: True) -> None:
        self._model, self._state, self._mine = model, state, mine

    def shards(self, place: Place | None = None) -> Iterator[Shard]:
        yield from self._model.shards(place)
        yield from self._state.slices(place)

    def rest(self) -> dict[str, Any]:
        return self._model.rest()

    def wants(self, heads: Sequence[Head]) -> list[Want]:
        own = [one for one in heads if one.group in FIRST and self._mine(one)]
        windows = self._state.wanted([one for one in own if one.group == "optimizer"])
        return [_all_of(one) for one in own if one.group == "model"] + [Want("optimizer", *w) for w in windows]

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        """Load a checkpoint of any number of ranks; return ""."""
        self._state.load({"model": dict(read("model")), "optimizer": {}}, dict(rest))
        self._state.load_slices({name: array.reshape(-1) for name, array in read("optimizer").items()})
        return ""


CALLBACKS = "callbacks"  # the group of a checkpoint that holds the arrays of callbacks


def state_key_of(callback: Any) -> str:
    """Return the name of a callback's state in a checkpoint: `Callback.state_key`, else the name of its class."""
    return str(getattr(callback, "state_key", type(callback).__name__))


class WithCallbacks:
    """The state ``inner``, and the arrays of callbacks that have ``arrays`` and ``load_arrays``, of rank 0."""

    def __init__(self, inner: Any, rank: int, callbacks: Sequence[Any]) -> None:
        self._inner, self._rank = inner, rank
        self._callbacks = {f"{n}.{state_key_of(c)}/": c for n, c in enumerate(callbacks)}

    def shards(self, place: Place | None = None) -> Iterator[Shard]:
        yield from self._inner.shards(place)
        yield from copied_shards(CALLBACKS, (
            (prefix + name, array) for prefix, callback in self._callbacks.items() if self._rank == 0
            for name, array in callback.arrays().items()), place)

    def rest(self) -> dict[str, Any]:
        return self._inner.rest()

    def wants(self, heads: Sequence[Head]) -> list[Want]:
        own = [one for one in heads if one.group != CALLBACKS]
        return [*self._inner.wants(own), *(_all_of(one) for one in heads if one.group == CALLBACKS)]

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        """Load ``inner``, then the callbacks' arrays, which come before their other state."""
        unfit: str = self._inner.load(read, rest)
        arrays = read(CALLBACKS)
        for prefix, callback in self._callbacks.items():
            callback.load_arrays({name.removeprefix(prefix): array for name, array in arrays.items()
                                  if name.startswith(prefix)})
        return unfit


def _all_of(one: Head) -> Want:
    return Want(one.group, one.name, 0, one.n)


def part(group: str, name: str, n: int, itemsize: int, rank: int, size: int) -> tuple[int, int] | None:
    """Return this rank's equal share [begin, end) of a replicated tensor of ``n``; small ones go whole to one rank."""
    if n * itemsize < LEAST_CUT_BYTES or n < size:
        return (0, n) if zlib.crc32(f"{group}/{name}".encode()) % size == rank else None
    return n * rank // size, n * (rank + 1) // size


class RankState:
    """State of each rank alone, such as its random generators."""

    def __init__(self, rank: int, state: Callable[[], Arrays], load: Callable[[Arrays], str]) -> None:
        self._group, self._state, self._load = own_group(rank), state, load

    def shards(self, place: Place | None = None) -> Iterator[Shard]:
        yield from copied_shards(self._group, self._state().items(), place)

    def rest(self) -> dict[str, Any]:
        return {}

    def wants(self, heads: Sequence[Head]) -> list[Want]:
        return [_all_of(one) for one in heads if one.group == self._group]

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        return self._load(dict(read(self._group)))


_PLACE = re.compile(r"\d{5}(?=/)")
"""What stands before the path of a Keras variable: its place among those of the whole model."""

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that wrappers of PyTorch (DataParallel, torch.compile) add; older checkpoints hold them."""

Keys = dict[str, list[str]]  # by group: a key for each array


def key(name: str) -> str:
    """Return the identity of an array in its group: of a Keras variable its place, else its name."""
    found = _PLACE.match(name)
    return found[0] if found else name


def fitting(own: Iterable[str], kept: Iterable[str]) -> dict[str, str]:
    """Return the own name of each name in ``kept`` that differs from an own one by wrappers only. Pure.

    A name that is an own one, and an ambiguous one, stay as they are.

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
    """Ranks by array. ``keys_P``: of the arrays of each rank; ``params_P``: the names of each rank's parameters."""

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
        """Return the ranks that have an array, ascending; the first gives it."""
        return self._ranks[group, key(name)]

    def mine(self, head: Head) -> bool:
        """Return whether this rank needs an array; of an optimizer without state yet, by the parameter's name."""
        ranks = self._ranks.get((head.group, key(head.name)))
        if ranks is not None:
            return self._rank in ranks
        owner = head.name.rpartition("/")[0]
        return head.group == "optimizer" and (owner in self._own or owner not in self._all)

    def check(self, heads: Sequence[Head]) -> None:
        """Raise `UserError` where a checkpoint's model differs from that of all ranks together."""
        own = {name for group, name in self._ranks if group == "model"}
        kept = {key(head.name): head.name for head in heads if head.group == "model"}
        missing, extra = sorted(own - set(kept)), sorted(kept[name] for name in set(kept) - own)
        if missing or extra:
            raise UserError(f"the checkpoint's model lacks {missing[:3]} and also has {extra[:3]}",
                            f"the {count(len(own), 'tensor')} of this model",
                            "resume with the model and optimizer of that run")


def holders_of(control: Control, state: ModelState, params: Collection[str]) -> Holders:
    """Gather which rank has which array; collective. Copies no array."""
    rows = control.gather((_keys(state), sorted(params)))
    return Holders(control.rank, [keys for keys, _ in rows], [names for _, names in rows])


def _keys(state: ModelState) -> Keys:
    return {group: [key(name) for name in arrays] for group, arrays in _named(state).items()}


def model_names(state: ModelState) -> list[str]:
    """Return the names of this rank's tensors in a checkpoint. Copies no array."""
    return list(_named(state)["model"])


def _named(state: ModelState) -> Mapping[str, Mapping[str, Any]]:
    groups, _ = state.state(lambda group, name, shape, dtype: ArrayWindow(0, np.empty(0, dtype)))
    return groups
