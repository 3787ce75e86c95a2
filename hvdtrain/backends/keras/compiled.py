"""The loss that `model.compile` asks for, as a sum over samples and its weight (law 1), on any backend of Keras.

Owns a run's facts of a model, too (`setup_of`). Keras' `CompileLoss` matches losses, outputs, targets and weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.keras.losses import guarded, has_fixed_batch, refuse_mask, weight_of_batch
from hvdtrain.backends.misfit import told
from hvdtrain.core.errors import UserError
from hvdtrain.data.layout import BatchLayout

Pair = tuple[Any, Any]


@dataclass
class Setup:
    """Facts of a model while a run uses it: its data's layout, and what `Trainer.fit` was given.

    ``data``: has a ``layout`` where x or y is nested. ``class_weight``: class -> weight, in training. ``metrics``: the
    `metrics.CompiledMetrics` of evaluations. ``follow(y, outputs, sample_weight, losses={name: (sum, weight)})``:
    measures training batches. ``task``: if `model.compile` decides the loss. ``outputs``: shape and type of a sample's,
    for a compiled model that is partitioned over ranks.
    """

    data: Any = None
    class_weight: dict[int, float] | None = None
    optimizer: Any = None
    metrics: Any = None
    task: CompiledTask | None = None
    follow: Callable[..., None] | None = None
    outputs: Any = None

    @property
    def layout(self) -> BatchLayout | None:
        """The structure of the data's x and y, unless it is plain."""
        return getattr(self.data, "layout", None)


_setups: weakref.WeakKeyDictionary[Any, Setup] = weakref.WeakKeyDictionary()


def setup_of(model: Any) -> Setup:
    """Return the facts of ``model``; they live as long as the model."""
    return _setups.setdefault(model, Setup())


def begin(model: Any, data: Any) -> None:
    """Forget what an earlier run knew of ``model``; ``data``: the training data, which knows how inputs lie."""
    setup = setup_of(model)
    setup.data, setup.follow, setup.class_weight = data, None, None


def build(spec: Any, sample: Callable[[int], Sequence[Any]] | None) -> None:
    """Give a model without variables its variables, from the model file's example or a first sample of the data.

    As `keras.Model.fit`, but in inference mode. Errors: `UserError` where the sample does not fit, or there is none.
    """
    model = spec.model
    if model.built and model.weights and all(layer.built for layer in model._flatten_layers()):
        return
    if spec.example is not None:
        batch = [spec.example(1)[0]]
        model(keras.tree.map_structure(keras.ops.convert_to_tensor, batch[0]), training=False)
    elif sample is not None:
        batch = list(sample(1))
        with told(model, batch):
            model(split(model, [keras.ops.convert_to_tensor(array) for array in batch])[0], training=False)
    if not model.weights:
        raise UserError("the model has no variables yet", "a model whose input shape is known",
                        "start it with keras.Input(shape), or build it in the model's callable")


def split(model: Any, batch: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return (x, y, sample_weight) of a flat batch, packed as the data had them; None for what it lacks."""
    layout = setup_of(model).layout
    if layout is not None:
        return layout.pack(batch)
    if not 1 <= len(batch) <= 3:
        raise UserError(f"a batch has {len(batch)} arrays", "(x, y) or (x, y, sample_weight)",
                        "return two or three arrays from the data, or give the model file a task(model, batch)")
    x, y, weight = [*batch, None, None][:3]
    return x, y, weight


def widened(outputs: Any) -> Any:
    """Return 16-bit floating tensors in float32, anything else as it is. Drops Keras' masks of what it casts."""
    def wide(x: Any) -> Any:
        narrow = hasattr(x, "dtype") and keras.backend.standardize_dtype(x.dtype) in ("float16", "bfloat16")
        return keras.ops.cast(x, "float32") if narrow else x
    return keras.tree.map_structure(wide, outputs)


def is_compiled(model: Any) -> bool:
    """Return whether `model.compile` gave a loss."""
    return bool(getattr(model, "compiled", False)) and getattr(model, "_compile_loss", None) is not None


def refuse_own_training(model: Any) -> None:
    """Raise `UserError` for a model whose own methods compute a loss, which would be ignored here."""
    for name in ("compute_loss", "train_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise UserError(
                f"{type(model).__name__} overrides {name}(), which is not called here", "a loss by name, or a task",
                "give the model file a task(model, batch) -> (loss_sum, weight); or use plain model.fit with "
                "`import hvdtrain.keras as hvd`, which calls it: optimizer hvd.DistributedOptimizer(...), data "
                "hvdtrain.keras.data.shard(...)")
    if hasattr(model, "preprocess_samples") and getattr(model, "preprocessor", None) is not None:
        raise UserError(f"{type(model).__name__} has a preprocessor, which keras_hub applies only in its own fit",
                        "data that is preprocessed, and a model without", "apply it to the data, x, y = "
                        "model.preprocessor(x, y), and set model.preprocessor = None")


class CompiledTask:
    """``task(model, batch, training) -> (loss_sum, weight)``: the compiled loss with all weights, and layers' losses.

    Layers' losses count once, after the division. Errors: `UserError` if the compiled loss is no mean over samples.
    """

    def __init__(self, model: Any) -> None:
        refuse_own_training(model)
        for loss in _losses(model):
            _refuse_reduction(loss)
        self._loss = _summed(model._compile_loss, has_fixed_batch(model))
        setup_of(model).task = self

    def __call__(self, model: Any, batch: Sequence[Any], training: bool) -> Pair:
        x = split(model, batch)[0]
        return self.of_outputs(model, model(x, training=training), batch, training)

    def of_outputs(self, model: Any, outputs: Any, batch: Sequence[Any], training: bool) -> Pair:
        """Return the same of ``outputs`` that the model has just returned for this batch."""
        _, y, weight = split(model, batch)
        setup = setup_of(model)
        if training and setup.class_weight is not None:
            weight = with_class_weight(setup.class_weight, y, weight)
        pairs = self._pairs(model, outputs, y, weight)
        total = pairs.pop("loss")
        if training and setup.follow is not None:
            setup.follow(y, outputs, weight, pairs)
        return total

    def pairs(self, model: Any, outputs: Any, batch: Sequence[Any]) -> dict[str, Pair]:
        """Return (sum, weight) of "loss" and, of several outputs, of each one's own loss before its loss weight."""
        _, y, weight = split(model, batch)
        return self._pairs(model, outputs, y, weight)

    def _pairs(self, model: Any, outputs: Any, y: Any, sample_weight: Any) -> dict[str, Pair]:
        if y is None:
            raise UserError("the data has no targets and the model was compiled with a loss", "(x, y)",
                            "give y, or compile without a loss where layers add theirs")
        total, weight, parts = self._loss.totals(y, outputs, sample_weight)
        for extra in model.losses:
            total = total + keras.ops.sum(keras.ops.cast(extra, total.dtype)) * keras.ops.cast(weight, total.dtype)
        return {"loss": (total, weight), **{f"{name}_loss": (part, weight) for name, part in parts.items()}}


def _losses(model: Any) -> list[Any]:
    return [loss for loss in keras.tree.flatten(model._compile_loss._user_loss) if loss is not None]


def _refuse_reduction(loss: Any) -> None:
    if not isinstance(loss, keras.losses.Loss):
        return
    name = type(loss).__name__
    if loss.reduction in ("sum", "none", None):
        raise UserError(
            f"loss {name} was made with reduction {loss.reduction!r}, whose gradient grows with the batch",
            "a mean over samples: sum_over_batch_size or mean_with_sample_weight",
            "leave the reduction out, and multiply the rate, or loss_weights, by the global batch for the same steps")
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise UserError(f"loss {name} overrides __call__()", "call(y_true, y_pred), one value per sample",
                        "rename the method to call, or give the model file a task(model, batch)")


def _summed(compile_loss: Any, fixed: bool) -> Any:
    """Return a copy of Keras' `CompileLoss` with sums for means, without metrics; ``fixed``: the batch size is."""
    kind = type(compile_loss)

    class Summed(kind):  # type: ignore[valid-type, misc]
        """Keras' matching of losses with outputs, targets and weights; each loss returns its sum."""

        _flat_losses: Any

        def build(self, y_true: Any, y_pred: Any) -> None:
            self._tracker = _NoMetrics()
            with keras.StatelessScope():  # Keras makes a metric for each output: no variable while a graph is traced
                super().build(y_true, y_pred)
            self._flat_losses = [entry._replace(loss=_Sum(entry.loss, fixed)) for entry in self._flat_losses]
            several = len(self._flat_losses) > 1
            self._output_losses = [_OutputLoss(entry.name) for entry in self._flat_losses] if several else []

        @property
        def metrics(self) -> list[Any]:
            """Objects that Keras updates with each output's loss before its weight."""
            return getattr(self, "_output_losses", [])

        def totals(self, y: Any, outputs: Any, sample_weight: Any) -> tuple[Any, Any, dict[str, Any]]:
            """Return (sum of the loss, its weight, the sum of each output's loss by name)."""
            if isinstance(sample_weight, dict) and isinstance(outputs, (list, tuple)) \
                    and self.output_names and set(sample_weight) == set(self.output_names):
                sample_weight = [sample_weight[name] for name in self.output_names]
            for entry in self._flat_losses or ():
                entry.loss.weight = None
            total = self(y, outputs, sample_weight)
            used = [entry.loss for entry in self._flat_losses if entry.loss.weight is not None]
            kinds = sorted({loss.kind for loss in used})
            if len(used) > 1 and (len(kinds) > 1 or kinds != ["samples"] and not _shared(kinds[0], sample_weight)):
                raise UserError(f"the losses of {len(used)} outputs are means over different weights: "
                                f"{', '.join(kinds)}", "one reduction for all losses",
                                "use sum_over_batch_size for all of them, without ignore_class")
            return total, used[0].weight, {part.name: part.value for part in self.metrics}

    return Summed(compile_loss._user_loss, compile_loss._user_loss_weights, output_names=compile_loss.output_names)


def _shared(kind: str, sample_weight: Any) -> bool:
    return kind == "sample weights" and not keras.tree.is_nested(sample_weight)


class _NoMetrics:
    """Placeholder for Keras' tracker of one metric for each output, which `_OutputLoss` replaces."""

    def add_to_store(self, store: str, metric: Any) -> None:
        """Ignore ``metric``."""


class _OutputLoss:
    """Placeholder for Keras' metric of one output's loss: keeps the sum, which Keras hands over as the mean."""

    def __init__(self, name: str) -> None:
        self.name, self.value = name, None

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        self.value = value


class _Sum:
    """A loss of Keras that returns a sum when it is called; ``weight`` divides the sum, ``kind`` names its unit.

    With values v of shape (B, ...), one per element, sample weights s and B samples, Keras' loss of the whole batch is

        sum_over_batch_size, mean:   sum_b mean(v_b * s_b) / B                  here: weight B
        ... where a loss ignores a class:    sum(v * s) / valid                 here: weight valid, those that count
        mean_with_sample_weight:     sum(v * s) / sum(s)                        here: weight sum(s)

    so sums over any shares of the batch give the whole. ``sum``, ``None`` and a model's own mask are refused.
    """

    def __init__(self, loss: Any, fixed: bool) -> None:
        fn = getattr(loss, "fn", None)
        home = str(getattr(fn if fn is not None else type(loss), "__module__", ""))
        self._loss, self._fixed = loss, fixed
        name = str(getattr(fn, "__name__", loss.name))
        self._values = guarded(self._called, name) if home.startswith("keras.") else self._called
        self.name, self.weight, self.kind = loss.name, None, ""

    def _called(self, y_true: Any, y_pred: Any) -> Any:
        """Return one value per element, in the types in which Keras hands them to the loss."""
        y_true, y_pred = (keras.tree.map_structure(
            lambda t: keras.ops.convert_to_tensor(t, dtype=self._loss.dtype), part) for part in (y_true, y_pred))
        return self._loss.call(y_true, y_pred)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        ops, loss = keras.ops, self._loss
        refuse_mask(y_pred)
        values = self._values(y_true, y_pred)
        mask = getattr(values, "_keras_mask", None)
        values = ops.convert_to_tensor(values, dtype=loss.dtype)
        if len(values.shape) == 0:
            alike = sample_weight is None and mask is None and not self._fixed
            self.kind, self.weight = "samples", weight_of_batch(values, y_pred, alike)
            return values * self.weight
        if sample_weight is not None:
            sample_weight = ops.convert_to_tensor(sample_weight, dtype=loss.dtype)
            if mask is not None:  # a mean over a sample's elements would forget which of them count
                missing = len(values.shape) - len(sample_weight.shape)
                sample_weight = ops.reshape(sample_weight, (*ops.shape(sample_weight), *(1,) * missing))
            values, sample_weight = aligned(values, sample_weight)
        return self._total(values, sample_weight, mask)

    def _total(self, values: Any, sample_weight: Any, mask: Any) -> Any:
        ops = keras.ops
        by_weights = self._loss.reduction == "mean_with_sample_weight" and sample_weight is not None
        weighted = values if sample_weight is None else values * sample_weight
        if mask is None and not by_weights:
            self.kind, self.weight = "samples", ops.cast(ops.shape(values)[0], values.dtype)
            return ops.sum(mean_of_sample(weighted))
        if mask is not None and getattr(self._loss, "ignore_class", None) is None:
            raise UserError(f"loss {self.name} masks its own values",
                            "a loss whose mask follows from the targets",
                            "give the model file a task(model, batch) and a weight(batch)")
        counts = ops.ones_like(values) if mask is None else ops.cast(ops.reshape(mask, ops.shape(values)), values.dtype)
        if by_weights:
            self.kind = "sample weights"
            self.weight = ops.sum(sample_weight if mask is None else sample_weight * counts)
        else:
            self.kind, self.weight = "valid elements", ops.sum(counts)
        return ops.sum(weighted * counts)


def ignored_class(model: Any) -> int | None:
    """Return the class that the compiled loss ignores; None of several losses, and of one that ignores none."""
    found = _losses(model)
    return getattr(found[0], "ignore_class", None) if len(found) == 1 else None


def aligned(values: Any, sample_weight: Any) -> Pair:
    """Return values and weights that multiply: weights of fewer dimensions weigh means over the missing dimensions."""
    ops, ranks = keras.ops, (len(values.shape), len(sample_weight.shape))
    if ranks[1] == ranks[0] + 1 and sample_weight.shape[-1] == 1:
        sample_weight = ops.squeeze(sample_weight, axis=-1)
    elif ranks[1] > ranks[0]:
        raise UserError(f"sample weights of {ranks[1]} dimensions for a loss of {ranks[0]}",
                        "one weight per sample, or one per element of the loss", "reshape the weights")
    elif ranks[1] < ranks[0]:
        values = ops.mean(values, axis=list(range(ranks[1], ranks[0])))
    return values, sample_weight


def mean_of_sample(values: Any) -> Any:
    """Return the mean over all but the first dimension: (B, ...) -> (B,)."""
    rank = len(values.shape)
    return keras.ops.mean(values, axis=list(range(1, rank))) if rank > 1 else values


def check_class_weight(class_weight: Any) -> dict[int, float]:
    """Return ``class_weight`` as numbers; `UserError` for anything that is no {class: weight}."""
    def usable(c: Any, w: Any) -> bool:
        return isinstance(c, (int, np.integer)) and isinstance(w, (int, float, np.number)) and 0 <= float(w) < np.inf
    if not isinstance(class_weight, dict) or not class_weight or not all(usable(c, w) for c, w in class_weight.items()):
        raise UserError(f"class_weight is {class_weight!r}", "{class number: weight of 0 or more}",
                        "give a dict such as {0: 1.0, 1: 5.0}; missing classes count 1")
    return {int(c): float(w) for c, w in class_weight.items()}


def with_class_weight(class_weight: dict[int, float], y: Any, sample_weight: Any) -> Any:
    """Return ``sample_weight`` (None: ones) times class weights, 1 if missing; classes (B,), (B, 1), one-hot (B, C)."""
    ops = keras.ops
    leaves = keras.tree.flatten(y) if y is not None else []
    if len(leaves) != 1:
        raise UserError(f"class_weight with {len(leaves)} targets", "one target, as in keras.Model.fit",
                        "multiply the sample weights of the output that it is for")
    classes = leaves[0]
    if len(classes.shape) > 1:
        classes = ops.squeeze(classes, axis=-1) if classes.shape[-1] == 1 else ops.argmax(classes, axis=-1)
    if len(classes.shape) > 1:
        raise UserError(f"class_weight with targets of {len(leaves[0].shape)} dimensions", "one class per sample",
                        "give sample weights per element instead")
    classes = ops.cast(ops.round(ops.cast(classes, "float32")), "int32")
    factor = ops.ones_like(ops.cast(classes, "float32"))
    for number, weight in class_weight.items():
        factor = ops.where(ops.equal(classes, number), ops.cast(weight, "float32"), factor)
    if sample_weight is None:
        return factor
    given = ops.cast(keras.tree.flatten(sample_weight)[0], "float32")
    missing = len(given.shape) - 1
    return given * (ops.reshape(factor, (-1, *(1,) * missing)) if missing else factor)


def batch_weight(model: Any) -> Callable[[Sequence[np.ndarray]], float] | None:
    """Return a function of the weight of this rank's share of a numpy batch, the task's; None: its samples."""
    if not is_compiled(model):
        return None
    special = [loss for loss in _losses(model) if getattr(loss, "reduction", "") == "mean_with_sample_weight"
               or getattr(loss, "ignore_class", None) is not None]
    if not special:
        return None
    loss = special[0]

    def weight(arrays: Sequence[np.ndarray]) -> float:
        _, y, given = split(model, arrays)
        classes = setup_of(model).class_weight
        if classes is not None:
            given = keras.ops.convert_to_numpy(with_class_weight(classes, y, given))
        first = np.asarray(keras.tree.flatten(y)[0])
        ignored = getattr(loss, "ignore_class", None)
        counts = np.ones(len(first)) if ignored is None else (first != ignored).astype(np.float64)
        if loss.reduction != "mean_with_sample_weight" or given is None:
            return float(counts.sum())
        given = np.asarray(keras.tree.flatten(given)[0], np.float64)
        if ignored is None:
            return float(given.sum())
        return float((counts.reshape(len(first), -1) * given.reshape(len(first), -1)).sum())
    return weight
