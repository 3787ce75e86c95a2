"""Refuse models that plain `keras.Model.fit` does not train exactly over `hvdtrain.keras.shard`.

Owns five checks: the losses' reductions, masks that reach the loss, losses that layers add, weights that a step leaves
out, and losses that couple samples. Scaled sample weights correct a mean over samples (`hvdtrain.keras.data`) only.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src.losses import loss as loss_base

from hvdtrain.backends import loss_coupling
from hvdtrain.core.errors import UserError, through_trace
from hvdtrain.keras.data import ShardedDataset

_TRAINER = "train with hvdtrain.Trainer, which weighs them by what they count"
_reading: list[ShardedDataset] = []
_weighed: list[ShardedDataset] = []
"""The one whose batches are being read, if its weights are not all 1: no loss of it goes without them."""


@contextmanager
def reading(shards: Sequence[ShardedDataset]) -> Iterator[None]:
    """Have `check_batch` look at the batches of a fit over ``shards``, and refuse masked values of a loss."""
    plain = loss_base.reduce_weighted_values

    def reduce(values: Any, sample_weight: Any = None, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if mask is not None:
            raise _masked("values that a loss masks by itself (ignore_class)")
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
    except Exception:  # noqa: BLE001  (fit reports what fails)
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
