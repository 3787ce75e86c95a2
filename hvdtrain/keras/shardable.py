"""Which models plain `keras.Model.fit` trains exactly over `hvdtrain.keras.shard`, and the refusal of the others.

Owns four checks: the losses' reductions, masks that reach the loss, losses that layers add, and weights that a step
leaves out. Scaled sample weights put a mean over samples right (`hvdtrain.keras.data`), and nothing else. Knows no
collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.losses import loss as loss_base

from hvdtrain.core.errors import UserError, through_trace
from hvdtrain.keras.data import Shard

_TRAINER = "train with hvdtrain.Trainer, which weighs them by what they count"
_reading: list[Shard] = []
_weighed: list[Shard] = []
"""The one whose batches are being read, if its weights are not all 1: no loss of it goes without them."""


@contextmanager
def reading(shards: Sequence[Shard]) -> Iterator[None]:
    """While a fit reads these: `check_batch` looks at the model's batches, and masked values of a loss are refused."""
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
    """While batches of ``data`` are read, by a fit or by an evaluation within it, such as that of a callback."""
    outer = _weighed[:]
    _weighed[:] = [data] if isinstance(data, Shard) and not data.of_ones() else []
    try:
        yield
    finally:
        _weighed[:] = outer


def check_losses(model: Any) -> None:
    """`UserError` where scaled sample weights do not give the mean of the global batch."""
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
                "a mean over all samples: ranks ignore unlike numbers of elements",
                f"leave it out and give sample weights of 0 and 1 per element; or {_TRAINER}"))


def _masked(got: str) -> UserError:
    """Return the refusal of ``got``, a mask."""
    return through_trace(UserError(
        f"{got} over hvdtrain.keras.shard",
        "a mean over samples: masked losses are means over elements, of which ranks have unlike numbers",
        "leave the mask out and give sample weights of 0 and 1 per element"))


def check_batch(model: Any, outputs: Any, sample_weight: Any) -> None:
    """The same for what only a batch shows, while its loss is taken: masks, losses that layers add, and weights that a
    step of the model's own leaves out.

    Nothing unless within `reading`.
    """
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
            f"hvdtrain.keras.shard, where {uneven.size} ranks have unlike numbers of samples",
            "the same number on every rank in every step",
            f"leave shares out, take a global_batch that {uneven.size} divides, and drop_remainder=True "
            f"unless the last batch is as long; or {_TRAINER}"))
