"""Shard every global batch over ranks for plain `keras.Model.fit`, exactly also for unequal shares: `shard`.

Owns the order, the cut and the sample weights. With w scaled by n_r * P / W, Keras' mean over a rank's n_r samples and
``hvd.DistributedOptimizer(op=Average)``'s mean over P ranks give the mean over the global batch of W samples:

    (1 / P) sum_r (1 / n_r) sum_i l_i w_i n_r P / W  =  (1 / W) sum_i l_i w_i

`hvdtrain.keras.metrics.MetricAverageCallback` undoes the scaling in the logs.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src.losses import loss as loss_base

from hvdtrain.backends import loss_coupling
from hvdtrain.backends.keras.compiled import check_class_weight, with_class_weight
from hvdtrain.core.errors import UserError, count, nearest, through_trace
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
    ranks, ``op=Average``; other models are refused (`hvdtrain.keras.data`). Errors: `UserError`.
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
        raise UserError("shard() before hvd.init()", "rank and size", "give shard(rank=..., size=...)")
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
            raise UserError("sample weights whose structure differs from y's", "one array, or one for each target",
                            "use the structure of y") from error
    return weights


def _length(arrays: Sequence[Any]) -> int:
    lengths = sorted({len(a) if np.ndim(a) else 0 for a in arrays})
    if len(lengths) != 1 or not lengths[0]:
        raise UserError(f"arrays of {', '.join(map(str, lengths))} samples", "one number of samples, 1 or more",
                        "check how x, y and sample_weight were made")
    return lengths[0]


_TRAINER = "train with hvdtrain.Trainer, which weights them"
_reading: list[ShardedDataset] = []
_weighed: list[ShardedDataset] = []
"""The one whose batches are being read, if its weights are not all 1: no loss of it goes without them."""


@contextmanager
def reading(shards: Sequence[ShardedDataset]) -> Iterator[None]:
    """Have `check_batch` look at the batches of a fit over ``shards``, and refuse masked values of a loss."""
    plain = loss_base.reduce_weighted_values

    def reduce(values: Any, sample_weight: Any = None, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if mask is not None:
            raise _masked("values that a loss masks itself (ignore_class)")
        return plain(values, sample_weight, mask, *args, **kwargs)

    _reading[:], loss_base.reduce_weighted_values = shards, reduce
    try:
        yield
    finally:
        loss_base.reduce_weighted_values = plain
        _reading.clear()


@contextmanager
def weighing(data: Any) -> Iterator[None]:
    """Note the weights of ``data`` while its batches are read, by a fit or an evaluation within it."""
    outer = _weighed[:]
    _weighed[:] = [data] if isinstance(data, ShardedDataset) and not data.of_ones() else []
    try:
        yield
    finally:
        _weighed[:] = outer


def check_losses(model: Any) -> None:
    """Raise `UserError` where scaled sample weights do not give the mean of the global batch."""
    given = getattr(getattr(model, "_compile_loss", None), "_user_loss", None)
    for loss in keras.tree.flatten(given) if given is not None else ():
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            raise through_trace(UserError(
                f"loss {loss.name} with reduction {reduction!r} over hvdtrain.keras.shard",
                "a mean over samples (sum_over_batch_size)", "leave the reduction out" if reduction in (
                    "sum", "none", None) else f"leave the reduction out; or {_TRAINER}"))
        if getattr(loss, "ignore_class", None) is not None:
            raise through_trace(UserError(
                f"loss {loss.name} with ignore_class={loss.ignore_class} over hvdtrain.keras.shard",
                "a mean over all samples: ranks ignore different numbers of elements",
                f"leave it out and give sample weights of 0 and 1 per element; or {_TRAINER}"))


def _masked(got: str) -> UserError:
    return through_trace(UserError(
        f"{got} over hvdtrain.keras.shard",
        "a mean over samples: masked losses are means over elements, of which ranks have different numbers",
        "leave the mask out and give sample weights of 0 and 1 per element"))


def check_batch(model: Any, outputs: Any, sample_weight: Any) -> None:
    """Raise `UserError` for masks, layers' losses and left-out weights of a batch, within `reading`."""
    if not _reading:
        return
    if _weighed and sample_weight is None:
        raise through_trace(UserError(
            f"compute_loss of {type(model).__name__} without sample_weight over hvdtrain.keras.shard",
            "the sample weights of the batch, which make the mean over ranks that of the global batch",
            "give compute_loss the sample_weight that keras.utils.unpack_x_y_sample_weight(data) returns"))
    if any(getattr(leaf, "_keras_mask", None) is not None for leaf in keras.tree.flatten(outputs)):
        raise _masked("a mask that reaches the loss (mask_zero, Masking)")
    uneven = next((shard for shard in _reading if not shard.even()), None)
    if uneven is None:
        return
    of_weights = sum(getattr(v, "regularizer", None) is not None for v in model.trainable_weights)
    if len(model.losses) > of_weights:
        raise through_trace(UserError(
            "losses that layers add for each batch (activity_regularizer, add_loss) over "
            f"hvdtrain.keras.shard, where {uneven.size} ranks have different numbers of samples",
            "the same number on every rank in every step",
            f"leave shares out, take a global_batch that {uneven.size} divides, and drop_remainder=True "
            f"unless the last batch is as long; or {_TRAINER}"))


_accepted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By model, the compiled loss that is a mean over samples."""


def check_shard(model: Any, shard: ShardedDataset, ranks: int) -> None:
    """Refuse a loss that is no mean over samples, on every rank; warn on a single one. Collective."""
    from hvdtrain.tensorflow import functions

    loss = getattr(model, "_compile_loss", None)
    if loss is not None and _accepted.get(model) is loss:
        return
    finding = _judge(model, shard)
    if ranks > 1:
        finding = loss_coupling.first_of(functions.gathered(finding))
    if finding is None or finding.outputs or finding.unjudged:
        if finding is not None and finding.unjudged and shard.size > 1 and shard.rank == 0:
            warnings.warn(finding.got, stacklevel=4)
        if loss is not None:
            _accepted[model] = loss
        return
    if shard.size > 1:
        raise loss_coupling.refusal(finding, "the ranks of hvdtrain.keras.shard")
    warnings.warn(loss_coupling.note_of(finding), stacklevel=4)


def _judge(model: Any, shard: ShardedDataset) -> loss_coupling.Finding | None:
    from hvdtrain.backends.tensorflow.trial import evaluator_of

    pool = shard.spread(loss_coupling.CANDIDATES)
    rows = loss_coupling.choose_rows(keras.tree.flatten(pool), max(shard.count(0), 1))
    x, y, weight = (keras.tree.map_structure(lambda a: a[rows], part) for part in pool)
    try:
        if not model.built:
            model(keras.tree.map_structure(lambda a: a[:1], x), training=False)
    except Exception:  # fit reports what fails
        return None

    def of_samples(numbers: Sequence[int], training: bool) -> tuple[Any, Any]:
        some = [keras.tree.map_structure(lambda a: keras.ops.convert_to_tensor(a[np.asarray(numbers)]), part)
                for part in (x, y, weight)]
        outputs = model(some[0], training=training)
        more = {"training": training} if "training" in inspect.signature(model.compute_loss).parameters else {}
        return model.compute_loss(x=some[0], y=some[1], y_pred=outputs, sample_weight=some[2], **more) * len(
            numbers), len(numbers)

    with evaluator_of(model, of_samples) as evaluate:
        return loss_coupling.judge(evaluate, len(rows))
