"""Judge the loss of a Keras model on a few samples, for `hvdtrain.keras.shard`, and refuse a loss that couples them."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.backends import loss_coupling
from hvdtrain.keras.data import Shard

_accepted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By model, the compiled loss that is a mean over samples."""


def check_shard(model: Any, shard: Shard, ranks: int) -> None:
    """Refuse a loss of ``model`` that is no mean over samples, for a fit over ``shard``; collective over ``ranks``.

    Errors: `UserError`, the same on every rank. On one rank a warning names the loss.
    """
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


def _judge(model: Any, shard: Shard) -> loss_coupling.Finding | None:
    """Judge the loss on samples of ``shard``."""
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
