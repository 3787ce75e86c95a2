"""``mixture``: samples of several sources in fixed proportions, which may change by epoch (a curriculum)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import load_callable
from hvdtrain.data.objects import ObjectSource, indexed
from hvdtrain.data.rows import ColumnNames
from hvdtrain.data.sources import SPLITS, STREAM, EpochSource, Source, Unreadable, fetched, innermost, resolve
from hvdtrain.data.stream import Arrays
from hvdtrain.planning.batch.sampler import at_least, cut, epoch_order

_KEYS = ("name", "args", "weight")
Curriculum = Callable[[int], Sequence[float]]


def make(split: str, sources: Sequence[Mapping[str, Any]], samples: int = 0, curriculum: str = "",
         seed: int = 0) -> Source | None:
    """Return a `Mixture` of ``sources``, each a dict of ``name``, ``args`` and ``weight`` (1 by default).

    ``samples``: of an epoch; 0: as many as all sources have. ``curriculum``: module:callable, from the number of an
    epoch to the weights in it. The test split holds each sample of the sources' test splits once; None without any.
    """
    at_least("data.args.samples", samples, 0)
    at_least("data.args.seed", seed, 0)
    if not isinstance(sources, (list, tuple)) or not sources:
        raise UserError(f"data.args.sources is {sources!r}", "a list of sources, such as [{name: digits, weight: 2}]",
                        "set data.args.sources")
    found = [_source(number, given, split) for number, given in enumerate(sources)]
    if split != SPLITS[0]:
        tests = [source for source, _ in found if source is not None]
        return Mixture(tests, list(map(len, tests)), 0, seed) if tests else None
    weights = [weight for _, weight in found]
    return Mixture([source for source, _ in found if source is not None], weights, samples, seed,
                   load_callable(curriculum, "data.args.curriculum") if curriculum else None)


def _source(number: int, given: Any, split: str) -> tuple[Source | None, float]:
    where = f"data.args.sources[{number}]"
    if not isinstance(given, Mapping) or "name" not in given:
        raise UserError(f"{where} is {given!r}", "a dict with name, args and weight", f"correct {where}")
    for key in given:
        if key not in _KEYS:
            raise UserError(f"{where} has the key {key!r}", nearest(str(key), _KEYS), f"correct {where}")
    found = resolve(str(given["name"]), given.get("args") or {}, split, [_objects])
    if found is not None and (not isinstance(found, Source) or not len(found)):
        kind = "has no samples" if isinstance(found, Source) else "can only be read in order (a stream)"
        raise UserError(f"{where}, {given['name']}, {kind}", "a source with an index", f"correct {where}")
    return found, given.get("weight", 1)


def _objects(obj: Any) -> Source | None:
    return ObjectSource(obj, ColumnNames()) if indexed(obj) else None


class Mixture(EpochSource):
    """``samples`` of an epoch, divided over ``sources`` by ``weights`` exactly (largest remainder), in mixed order.

    Sample i of epoch e is a function of (``seed``, e, i) only. Each source is shuffled and read to its end before a
    sample of it comes again, also over epochs. ``curriculum``: epoch -> weights; such a mixture is computed from the
    epochs before. ``unit``: what an epoch has once each, since it may take a sample several times or not at all.
    Errors: `UserError` for weights that are none, and for sources whose rows differ.
    """

    unit = "place of the mixture"

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], samples: int = 0, seed: int = 0,
                 curriculum: Curriculum | None = None) -> None:
        self.sources = list(sources)
        self.fixed = all(getattr(innermost(source), "fixed", False) for source in self.sources)
        self.scale = self._common_scale()
        self._weights, self._curriculum, self._seed = weights, curriculum, seed
        self._n = samples or sum(map(len, self.sources))
        self._begun: list[list[int]] = [[0] * len(self.sources)]
        self._made: tuple[int, np.ndarray, np.ndarray] | None = None
        self._kinds: list[tuple] = []
        self._quotas(0)

    def __len__(self) -> int:
        return self._n

    def _common_scale(self) -> Any:
        """Return the normalisation of the sources' pictures, which augmentation undoes; None where there is none."""
        scales = [getattr(innermost(source), "scale", None) for source in self.sources]
        if len({*scales} - {None}) > 1:
            raise UserError("sources of the mixture normalise pictures differently", "one mean, std and layout",
                            "give all sources the same data.args")
        return scales[0] if len({*scales}) == 1 else None

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> Arrays:
        of_N, number_N = self._plan(epoch)
        rows: list[np.ndarray] = []
        of_n, number_n = of_N[indices_n], number_N[indices_n]
        for k in np.unique(of_n).tolist():
            (at,) = np.nonzero(of_n == k)
            arrays = self._fetched(k, number_n[at], indices_n[at], epoch)
            rows = rows or [np.empty((len(indices_n), *array.shape[1:]), array.dtype) for array in arrays]
            for whole, array in zip(rows, arrays):
                whole[at] = array
        return tuple(rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def _fetched(self, k: int, number_m: np.ndarray, asked_m: np.ndarray, epoch: int) -> Arrays:
        try:
            arrays = fetched(self.sources[k], number_m, epoch)
        except Unreadable as error:
            asked = int(asked_m[np.flatnonzero(number_m == error.number)[0]])
            raise Unreadable(asked, error.place, f"{error.reason} (sample {error.number} of source {k})") from None
        kinds = [(array.dtype, array.shape[1:]) for array in arrays]
        self._kinds = self._kinds or kinds
        if kinds != self._kinds:
            shown = [", ".join(f"{dtype}{list(shape)}" for dtype, shape in each) for each in (kinds, self._kinds)]
            raise UserError(f"source {k} of the mixture has rows of {shown[0]}", f"those of another, {shown[1]}",
                            "give all sources one type and shape")
        return arrays

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return of each sample of ``epoch`` its source and its number there, int64[N] both."""
        if self._made is None or self._made[0] != epoch:
            quotas, begun = self._quotas(epoch), self._start(epoch)
            of_N = np.repeat(np.arange(len(quotas)), quotas)
            number_N = np.concatenate([self._numbers(k, begun[k], quota) for k, quota in enumerate(quotas)])
            order_N = epoch_order(self._n, self._seed, STREAM // 2 + epoch, shuffle=True)
            self._made = epoch, of_N[order_N], number_N[order_N]
        return self._made[1:]

    def _numbers(self, k: int, first: int, quota: int) -> np.ndarray:
        """Return the samples of source ``k`` at its places [first, first + quota): one permutation after the other."""
        n, found = len(self.sources[k]), [np.empty(0, np.int64)]
        for turn in range(first // n, -(-(first + quota) // n)):
            order = epoch_order(n, self._seed, STREAM // 4 + turn * len(self.sources) + k, shuffle=True)
            found.append(order[max(0, first - turn * n):first + quota - turn * n])
        return np.concatenate(found)

    def _start(self, epoch: int) -> list[int]:
        """Return how many samples of each source earlier epochs have taken."""
        if self._curriculum is None:
            return [epoch * quota for quota in self._quotas(0)]
        while len(self._begun) <= epoch:
            quotas = self._quotas(len(self._begun) - 1)
            self._begun.append([a + b for a, b in zip(self._begun[-1], quotas)])
        return self._begun[epoch]

    def _quotas(self, epoch: int) -> list[int]:
        weights = self._weights if self._curriculum is None else self._curriculum(epoch)
        usable = np.ndim(weights) == 1 and len(weights) == len(self.sources) and all(
            isinstance(w, (int, float, np.number)) and not isinstance(w, bool) and math.isfinite(w) and w >= 0
            for w in weights) and any(weights)
        if not usable:
            raise UserError(f"the weights of the mixture are {weights!r} in epoch {epoch}",
                            f"{len(self.sources)} finite numbers >= 0, one of them positive", "correct the weights")
        return np.diff(cut(self._n, [float(w) for w in weights])).tolist()
