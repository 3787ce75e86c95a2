"""The loss of a Keras model as a sum over samples, on any backend of Keras.

A model file's own ``task(model, batch) -> (loss_sum, weight)`` owns all of the loss; else config's loss by name, what
the model was compiled with (`compiled`), or the targets' type decides.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.keras import compiled, losses
from hvdtrain.backends.pairs import Pair, checked_pair
from hvdtrain.config import Config, Named
from hvdtrain.core.errors import UserError
from hvdtrain.data.weighting import LabelWeight

Loss = Callable[[Any, Any], Any]


class Task:
    """``task(model, batch, training) -> (loss_sum, weight)``, two scalars, of a spec whose model is a `keras.Model`.

    A loss by name is evaluated per element, averaged over a sample's trailing dimensions, weighted by sample weights,
    and summed over samples; the weight is the number of samples, less their share of ignored labels (``ignore_class``),
    as Keras' own mean divides. What layers add (``model.losses``) counts once per sample, so once after the division by
    the global weight. ``full(outputs)``: the context in which a loss of such outputs is taken. ``ignored``: the label
    that the loss does not count. ``batch_weight``: weighs a numpy batch as a loss by name that ignores a label does;
    None for other losses. Errors: `UserError` for an unknown loss.
    """

    def __init__(self, spec: Any, config: Config,
                 full: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        self._own, self._full = spec.task, full
        self._compiled: compiled.CompiledTask | None = None
        self._loss: Loss | None = None
        self._mixes = config.mixes_classes
        self.ignored: int | None = None
        self.batch_weight: LabelWeight | None = None
        if spec.task is not None:
            return
        compiled.refuse_own_training(spec.model)
        _check_mixed(spec, config)
        if by_compile(spec, config):
            self._compiled = compiled.CompiledTask(spec.model)
            self.ignored = compiled.ignored_class(spec.model)
            return
        self._loss, self.ignored = _resolved(config, spec.model), config.loss.args.get("ignore_class")
        if self.ignored is not None:
            self.batch_weight = LabelWeight(lambda batch: _labels(spec.model, batch), self.ignored)

    @property
    def of_layers(self) -> bool:
        """True if losses that layers add are part of the loss."""
        return self._own is None

    def __call__(self, model: Any, batch: Sequence[Any], training: bool) -> Pair:
        if self._own is not None:
            return checked_pair(Phase(self._own, model)(batch, training=training))
        outputs = model(compiled.split(model, batch)[0], training=training)
        if self._compiled is not None:
            return self._compiled.of_outputs(model, outputs, batch, training)
        return self._by_name(model, outputs, batch, training)

    def pairs(self, model: Any, outputs: Any, batch: Sequence[Any]) -> dict[str, Pair]:
        """Return (sum, weight) of "loss" in an evaluation, and of each output of a compiled model with several."""
        if self._compiled is not None:
            return self._compiled.pairs(model, outputs, batch)
        return {"loss": self._by_name(model, outputs, batch, False)}

    def _by_name(self, model: Any, outputs: Any, batch: Sequence[Any], training: bool) -> Pair:
        _, y, weight = compiled.split(model, batch)
        setup = compiled.setup_of(model)
        if training and setup.class_weight is not None:
            weight = compiled.with_class_weight(setup.class_weight, y, weight)
        if training and setup.follow is not None:
            setup.follow(keras.ops.argmax(y, axis=-1) if self._mixes else y, outputs, weight)
        n, added = keras.ops.shape(keras.tree.flatten(outputs)[0])[0], model.losses
        if self.ignored is not None:
            n = keras.ops.sum(compiled.mean_of_sample(losses.counted(y, self.ignored)))
        if y is None and getattr(model, "compiled", False) and added:  # layers bring all of the loss
            total: Any = 0.0
        else:
            if keras.tree.is_nested(outputs):
                raise UserError(f"the model returns a {type(outputs).__name__}", "one tensor, for "
                                "a loss by name", "give the model file a task(model, batch) -> (loss_sum, weight)")
            if y is None or keras.tree.is_nested(y):
                raise UserError(f"the data's targets are {'missing' if y is None else 'several'}",
                                "one array, for a loss by name", "compile the model with a loss for each output")
            assert self._loss is not None
            losses.refuse_mask(outputs)
            with self._full(outputs):
                values = self._loss(y, compiled.widened(outputs))
            if len(values.shape) == 0:
                alike = weight is None and self.ignored is None and not losses.has_fixed_batch(model)
                weight = losses.weight_of_batch(values, outputs, alike)
            total = _summed(values, weight)
        for extra in added:
            extra = keras.ops.sum(keras.ops.cast(extra, getattr(total, "dtype", "float32")))
            total = total + extra * keras.ops.cast(n, extra.dtype)
        return total, n


def _labels(model: Any, batch: Sequence[Any]) -> Any:
    """Return class numbers of a numpy batch, which Keras takes as floating numbers too."""
    return np.asarray(compiled.split(model, batch)[1]).astype(np.int64, copy=False)


def _summed(values: Any, weight: Any) -> Any:
    """Return the sum over samples of the mean of each, times weights per sample or element if given."""
    wide = "float64" if keras.backend.standardize_dtype(values.dtype) == "float64" else "float32"
    values = keras.ops.cast(values, wide)
    if weight is not None:
        values, weight = compiled.aligned(values, keras.ops.cast(weight, wide))
        values = values * weight
    return keras.ops.sum(compiled.mean_of_sample(values))


class Phase(keras.layers.Layer):
    """Runs ``function(model, batch)`` as a Keras layer, so that every layer called inside knows whether it trains.

    Keras also forgets what the model's layers added to the loss in the call before.
    """

    def __init__(self, function: Callable[..., Any], model: Any) -> None:
        super().__init__(name="phase", autocast=False)
        self._function, self._model = function, model
        self.built = True

    def call(self, batch: Any, training: bool = False) -> Any:
        """Call the function; ``training`` reaches nested layers through Keras' call context."""
        takes = "training" in inspect.signature(self._function).parameters
        return self._function(self._model, batch, **({"training": training} if takes else {}))


def by_compile(spec: Any, config: Config) -> bool:
    """Return whether `model.compile` decides the loss: no task in the model file, and no loss in the configuration."""
    own = config.loss.name == "auto" and not config.loss.args
    return spec.task is None and own and compiled.is_compiled(spec.model)


def loss_name(spec: Any, config: Config) -> str:
    if spec.task is not None:
        return "the model file's task"
    if config.loss.name != "auto":
        return config.loss.name
    loss = compiled_loss(spec.model)
    if loss is None and config.mixes_classes:
        return "categorical cross entropy of logits"
    if loss is None:
        return "by the targets: sparse categorical cross entropy of logits, or squared error"
    return ", ".join(name_of(part) for part in keras.tree.flatten(loss) if part is not None)


def compiled_loss(model: Any) -> Any:
    """Return what `model.compile` was given as loss; None without one."""
    return getattr(model, "loss", None) if getattr(model, "compiled", False) else None


def name_of(loss: Any) -> str:
    """Return the name of a loss that `model.compile` was given as a name, a function or an object."""
    return loss if isinstance(loss, str) else str(getattr(loss, "name", getattr(loss, "__name__", "as compiled")))


def _check_mixed(spec: Any, config: Config) -> None:
    sparse = losses.sparse(config.loss.name)
    if config.mixes_classes and (sparse or by_compile(spec, config)):
        raise UserError("data.augment.mixup, whose targets are class probabilities, with "
                        + (f"loss {config.loss.name}" if sparse else "the loss that the model was compiled with"),
                        "a loss of class probabilities, which also accepts class numbers",
                        "set loss.name: CategoricalCrossentropy, with loss.args.from_logits where it has no softmax")


def _resolved(config: Config, model: Any) -> Loss:
    """Return ``loss(y, outputs)`` without reduction: config's, else the compiled model's, else by the targets' type."""
    named = config.loss
    if named.name != "auto":
        return losses.by_name(named)
    own = compiled_loss(model)
    if own is None:
        return losses.guarded(_auto(named.args, config.mixes_classes), "auto")
    if not isinstance(own, str):
        raise UserError(f"loss.args {named.args} together with a loss object given to model.compile",
                        "one of the two", "leave loss.args empty")
    return losses.by_name(Named(own, named.args))


def _auto(args: dict[str, Any], mixes: bool) -> Loss:
    """Return cross entropy of logits for class numbers, or for shares if the run ``mixes`` them; else squared error."""
    args = losses.without_reduction(Named("auto", args))
    settings = {"from_logits": True, **args, "reduction": None}

    def loss(y: Any, outputs: Any) -> Any:
        if not losses.is_integer(y) and not mixes:
            return keras.losses.MeanSquaredError(**args, reduction=None)(y, outputs)
        if len(outputs.shape) < 2 or outputs.shape[-1] == 1:
            raise UserError(f"the targets are integers and the model's outputs have shape {tuple(outputs.shape)}",
                            "one output per class", "set loss, for example to BinaryCrossentropy")
        if mixes or "label_smoothing" in args:  # which Keras' sparse loss lacks
            return keras.losses.CategoricalCrossentropy(**settings)(losses.as_shares(y, outputs), outputs)
        return keras.losses.SparseCategoricalCrossentropy(**settings)(y, outputs)
    return loss
