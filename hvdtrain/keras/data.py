"""Shard every global batch over ranks for plain `keras.Model.fit`, exactly also for unequal shares: `shard`.

Owns the order, the cut and the sample weights. With w scaled by n_r * P / W, Keras' mean over a rank's n_r samples and
``hvd.DistributedOptimizer(op=Average)``'s mean over P ranks give the mean over the global batch of W samples:

    (1 / P) sum_r (1 / n_r) sum_i l_i w_i n_r P / W  =  (1 / W) sum_i l_i w_i

`hvdtrain.keras.metrics.MetricAverageCallback` undoes the scaling in the logs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.keras.compiled import check_class_weight, with_class_weight
from hvdtrain.core.errors import UserError, count, nearest
from hvdtrain.planning.batch.sampler import BatchShares, at_least, epoch_order


def shard(x: Any, y: Any = None, sample_weight: Any = None, *, global_batch: int, shares: Sequence[float] | None = None,
          class_weight: dict[int, float] | None = None, shuffle: bool = True, seed: int = 0,
          drop_remainder: bool = False, epoch: int = 0, rank: int | None = None,
          size: int | None = None) -> ShardedDataset:
    """Return this rank's share of ``x, y`` for ``model.fit(shard(...))``; all ranks give the same arrays and arguments.

    ``x``, ``y``: arrays, or dicts and tuples of them, first axis samples. ``sample_weight``: one array, or one for each
    output; outputs that a dict leaves out count 1. ``global_batch``: samples of a step over all ranks. ``shares``:
    weights of the ranks' shares, equal by default. ``class_weight``: as in `keras.Model.fit`, also beside sample
    weights. ``shuffle``: in each epoch, from (seed, epoch) alone; fit's own ``shuffle`` has no effect.
    ``drop_remainder``: no short last batch. ``epoch``: the number of the first epoch, for a fit with ``initial_epoch``.
    ``rank``, ``size``: hvdtrain's by default. Needs a loss that is a mean over samples (Keras' default) and, over
    ranks, ``op=Average``; other models are refused (`hvdtrain.keras.shardable`). Errors: `UserError`.
    """
    if rank is None or size is None:
        rank, size = _place()
    return ShardedDataset(x, y, sample_weight, global_batch, [1.0] * size if shares is None else shares, class_weight,
                          shuffle, seed, drop_remainder, epoch, rank)


class ShardedDataset(keras.utils.PyDataset):
    """The dataset of `shard`: items are (x, y, sample_weight) of this rank. Not for several workers."""

    def __init__(self, x: Any, y: Any, sample_weight: Any, global_batch: int, shares: Sequence[float],
                 class_weight: dict[int, float] | None, shuffle: bool, seed: int, drop_remainder: bool, epoch: int,
                 rank: int) -> None:
        super().__init__()
        at_least("global_batch", global_batch, 1)
        if y is None:
            raise UserError("shard(x) without y", "targets, whose loss the sample weights scale",
                            "give y (of an autoencoder: y=x)")
        self._x, self._y = (keras.tree.map_structure(np.asarray, part) for part in (x, y))
        self.samples = _length([*keras.tree.flatten(self._x), *keras.tree.flatten(self._y)])
        if sample_weight is not None:
            sample_weight = _weights_of_outputs(sample_weight, self._y, self.samples)
            _length([*keras.tree.flatten(self._x)[:1], *keras.tree.flatten(sample_weight)])
        if class_weight is not None:
            sample_weight = keras.ops.convert_to_numpy(
                with_class_weight(check_class_weight(class_weight), self._y, sample_weight))
        self._weight = np.ones(self.samples, np.float32) if sample_weight is None else sample_weight
        self._weighted = sample_weight is not None
        self._cut, self.rank, self.size = BatchShares.of(shares), rank, len(shares)
        self._cut.offsets(0)
        assert 0 <= rank < self.size
        self.global_batch, self._shuffle, self._seed = int(global_batch), shuffle, seed
        self._steps = self.samples // self.global_batch if drop_remainder else -(-self.samples // self.global_batch)
        if self._steps == 0:
            raise UserError(f"{count(self.samples, 'sample')} for a global batch of {global_batch}",
                            "at least one whole batch", "lower global_batch, or leave drop_remainder out")
        self._epoch, self._begun = epoch - 1, False
        self._next: int | None = None
        self._order = np.arange(0)

    def __len__(self) -> int:
        return self._steps

    def spread(self, most: int) -> tuple[Any, Any, Any]:
        """Return (x, y, sample_weight) of up to ``most`` samples spread over the data."""
        rows = np.linspace(0, self.samples - 1, min(self.samples, most), dtype=np.int64)
        x, y, weight = (keras.tree.map_structure(lambda a: a[rows], part) for part in (self._x, self._y, self._weight))
        return x, y, weight

    def total(self, step: int) -> int:
        """Return the samples of global batch ``step`` over all ranks."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def count(self, step: int) -> int:
        """Return this rank's samples of ``step``, 0 where its item is a placeholder of weight 0."""
        offsets = self._cut.offsets(self.total(step))
        return int(offsets[self.rank + 1] - offsets[self.rank])

    def even(self) -> bool:
        """Return whether all ranks have as many samples in every step."""
        return all(len({b - a for a, b in zip(offsets, offsets[1:])}) == 1
                   for offsets in (self._cut.offsets(self.total(step)).tolist() for step in (0, self._steps - 1)))

    def of_ones(self) -> bool:
        """Return whether every sample weight of every rank is 1."""
        return self.even() and not self._weighted

    def on_epoch_begin(self) -> None:
        self._epoch += 1
        self._order = epoch_order(self.samples, self._seed, self._epoch, self._shuffle)
        self._next = 0
        _latest[:] = [weakref.ref(self)]

    def on_epoch_end(self) -> None:
        self._next = None

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        # Within an epoch the k-th item read is step k: Keras asks in an order of its own, which differs between ranks.
        if self._next is not None and self._next < self._steps:
            index, self._next = self._next, self._next + 1
        order = self._order if len(self._order) else epoch_order(
            self.samples, self._seed, self._epoch + 1, self._shuffle)
        whole = order[index * self.global_batch:][:self.total(index)]
        offsets = self._cut.offsets(len(whole))
        mine = whole[offsets[self.rank]:offsets[self.rank + 1]]
        factor = np.float32(len(mine) * self.size / len(whole))
        if not len(mine):
            mine = whole[:1]
        x, y = (keras.tree.map_structure(lambda a: a[mine], part) for part in (self._x, self._y))
        return x, y, keras.tree.map_structure(lambda w: w[mine] * factor, self._weight)


_latest: list[Any] = []


def forget() -> None:
    """Forget the dataset that `being_read` returns."""
    _latest.clear()


def being_read() -> ShardedDataset | None:
    """Return the `ShardedDataset` whose epoch began last since `forget`."""
    return _latest[0]() if _latest else None


def _place() -> tuple[int, int]:
    if keras.backend.backend() == "tensorflow":
        from hvdtrain import tensorflow as hvd

        return hvd.rank(), hvd.size()
    from hvdtrain.cluster import boot

    control = boot.current_control()
    if control is None:
        raise UserError("shard() before the ranks know one another", "rank and size", "give shard(rank=..., size=...)")
    return control.rank, control.size


def _weights_of_outputs(given: Any, y: Any, samples: int) -> Any:
    """Return sample weights as float32, one array or one for each of ``y``; missing outputs count 1."""
    if isinstance(given, Mapping) and isinstance(y, Mapping):
        unknown = [name for name in given if name not in y]
        if unknown:
            raise UserError(f"sample weights for {', '.join(map(repr, unknown))}", nearest(unknown[0], y),
                            "name them as the targets")
        given = {name: given.get(name, np.ones(samples, np.float32)) for name in y}
    weights = keras.tree.map_structure(lambda w: np.asarray(w, np.float32), given)
    if keras.tree.is_nested(weights):
        try:
            keras.tree.assert_same_paths(weights, y)
        except (ValueError, TypeError) as error:
            raise UserError("sample weights of another structure than y", "one array, or one for each target",
                            "give them as y is given") from error
    return weights


def _length(arrays: Sequence[Any]) -> int:
    lengths = sorted({len(a) if np.ndim(a) else 0 for a in arrays})
    if len(lengths) != 1 or not lengths[0]:
        raise UserError(f"arrays of {', '.join(map(str, lengths))} samples", "one number of samples, 1 or more",
                        "check how x, y and sample_weight were made")
    return lengths[0]
