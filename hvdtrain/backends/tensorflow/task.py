"""The loss of a Keras model as a sum over samples: a model file's task, `model.compile`'s, or by Keras' own names.

A model file's own ``task(model, batch) -> (loss_sum, weight)`` comes before everything here and owns all of the loss.
Without one and without a loss in the configuration, what the model was compiled with counts, as
`hvdtrain.keras.compiled` has it. Else the loss is evaluated per element, averaged over a sample's trailing dimensions,
weighted by the batch's third array if there is one, and summed over the samples; the weight is the number of samples.
What layers add (``model.losses``: regularisers, ``add_loss``) counts once per sample, so that it counts once after the
division by the global weight.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.transforms import precision
from hvdtrain.config import Config, Named
from hvdtrain.errors import UserError
from hvdtrain.keras import compiled, losses, shapes

Pair = tuple[Any, Any]
Loss = Callable[[Any, Any], Any]
Task = Callable[[Any, tuple[Any, ...], bool], Pair]


def make_task(spec: Any, config: Config) -> Task:
    """Return ``task(model, batch, training) -> (loss_sum, weight)``, two scalars; `UserError` for an unknown loss."""
    if spec.task is not None:
        return _users(spec.task)
    if by_compile(spec, config):
        return compiled.CompiledTask(spec.model)
    compiled.refuse_own_training(spec.model)
    loss = resolve_loss(config.loss, spec.model)

    def task(model: keras.Model, batch: tuple[Any, ...], training: bool) -> Pair:
        x, y, weight = compiled.split(model, batch)
        setup = compiled.setup_of(model)
        if training and setup.class_weight is not None:
            weight = compiled.with_class_weight(setup.class_weight, y, weight)
        outputs = model(x, training=training)
        if training and setup.follow is not None:
            setup.follow(y, outputs, weight)
        if y is None and getattr(model, "compiled", False) and model.losses:  # layers bring all of the loss
            return layers_pair(model, outputs)
        parts = (x, y) if weight is None else (x, y, weight)
        return default_pair(loss, model, outputs, batch[:1] if y is None else parts)

    return task


def by_compile(spec: Any, config: Config) -> bool:
    """Whether `model.compile` rules the loss: no task in the model file, and no loss in the configuration."""
    own = config.loss.name == "auto" and not config.loss.args
    return spec.task is None and own and compiled.is_compiled(spec.model)


def layers_pair(model: keras.Model, outputs: Any) -> Pair:
    """(what layers added, once per sample; number of samples), for a model compiled without a loss."""
    count = tf.cast(tf.shape(tf.nest.flatten(outputs)[0])[0], tf.float32)
    return tf.add_n([tf.reduce_sum(tf.cast(extra, tf.float32)) for extra in model.losses]) * count, count


def default_pair(loss: Loss, model: keras.Model, outputs: Any, batch: tuple[Any, ...]) -> Pair:
    """(sum over samples, number of samples) for ``outputs`` of shape (B, ...) and batch (x, y[, sample_weight])."""
    if len(batch) not in (2, 3):
        raise UserError(f"a batch has {len(batch)} arrays", "(x, y) or (x, y, sample_weight)",
                        "return two or three arrays from the data, or give the model file a task(model, batch)")
    if not tf.is_tensor(outputs):
        raise UserError(f"the model returns a {type(outputs).__name__}", "one tensor, where the loss is by name",
                        "give the model file a task(model, batch) -> (loss_sum, weight)")
    n = tf.shape(outputs)[0]
    per_sample_B = loss(batch[1], precision.widened(outputs))
    per_sample_B = tf.cast(per_sample_B, _wide(per_sample_B))
    if per_sample_B.shape.rank == 0:
        raise UserError("the loss returns one number for the whole batch", "one value per sample",
                        "leave out the loss's own reduction, or give the model file a task(model, batch)")
    if len(batch) == 3:
        weight = tf.cast(batch[2], per_sample_B.dtype)
        if 1 < weight.shape.rank <= per_sample_B.shape.rank:  # one weight per token, say
            missing = per_sample_B.shape.rank - weight.shape.rank
            per_sample_B = per_sample_B * tf.reshape(weight, tf.concat([tf.shape(weight), [1] * missing], 0))
            weight = tf.ones([n], per_sample_B.dtype)
        per_sample_B = _mean_of_sample(per_sample_B) * tf.reshape(weight, [n])
    total = tf.reduce_sum(_mean_of_sample(per_sample_B))
    count = tf.cast(n, total.dtype)
    if model.losses:
        total += tf.add_n([tf.cast(extra, total.dtype) for extra in model.losses]) * count
    return total, count


class ClassNumbers:
    """Looks at integer targets on the host: TensorFlow fails on those out of range, or gives NaN on a GPU.

    Only for the sparse categorical cross entropy, and where the model says the number of its outputs beforehand;
    other models' targets are looked at when an operation has failed.
    """

    def __init__(self, spec: Any, config: Config) -> None:
        self._model = spec.model
        loss = getattr(spec.model, "loss", None) if getattr(spec.model, "compiled", False) else None
        name = loss if isinstance(loss, str) else "auto" if loss is None else _name_of(loss)
        self._name = name if config.loss.name == "auto" else config.loss.name
        self._looks = spec.task is None and (self._name == "auto" or shapes.sparse(self._name))
        self._ignored = config.loss.args.get("ignore_class", getattr(loss, "ignore_class", None))
        axis = config.loss.args.get("axis", getattr(loss, "axis", -1))
        shape = _output_shape(spec.model) if axis == -1 else None
        self._classes = shape[-1] if shape and len(shape) > 1 and isinstance(shape[-1], int) else None

    def check(self, batch: tuple[Any, ...], classes: int | None = None) -> None:
        """Raise `UserError` for targets outside 0..C-1, C being the model's outputs or ``classes``."""
        classes = classes or self._classes
        if not (self._looks and classes and len(batch) > 1):
            return
        targets = compiled.split(self._model, batch)[1]
        if not isinstance(targets, np.ndarray):
            return
        if targets.dtype.kind not in "iu" or not targets.size or classes < 2:
            return
        low, high, shape = int(targets.min()), int(targets.max()), targets.shape
        if 0 <= low and high < classes:
            return
        if self._ignored is not None:
            targets = targets[targets != self._ignored]
            low, high = (int(targets.min()), int(targets.max())) if targets.size else (0, 0)
            if 0 <= low and high < classes:
                return
        raise UserError(f"loss {self._name}: the targets are {targets.dtype}{list(shape)}; "
                        f"targets run from {low} to {high}", f"0..{classes - 1} for a model with {classes} outputs",
                        "number the classes from 0, or give the model more outputs")

    @contextlib.contextmanager
    def checked(self, batch: tuple[Any, ...]) -> Iterator[None]:
        """Around the graph's run: `check` before it, and after a failed operation with the range that this names."""
        self.check(batch)
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            found = re.search(r"label value.*outside the valid range of \[0, (\d+)\)", error.message, re.DOTALL)
            if found:
                self.check(batch, int(found[1]))
            raise


def _output_shape(model: keras.Model) -> tuple[Any, ...] | None:
    """The model's output shape, or None where it is known only once the model is called, or is of several tensors."""
    try:
        shape = model.output_shape
    except (AttributeError, ValueError):
        return None
    return shape if isinstance(shape, tuple) else None


def _wide(x: Any) -> tf.DType:
    """The type a loss is summed in: float64 where it comes in it, else float32."""
    return tf.float64 if getattr(x, "dtype", None) == tf.float64 else tf.float32


def _mean_of_sample(x: tf.Tensor) -> tf.Tensor:
    """(B, ...) -> (B,): mean over all but the first dimension."""
    return tf.reduce_mean(x, axis=list(range(1, x.shape.rank))) if x.shape.rank > 1 else x


def _users(task: Callable[..., Pair]) -> Task:
    """A model file's task; layers learn from Keras whether they train, also where the task does not hand it on."""
    if "training" in inspect.signature(task).parameters:
        def run(model: keras.Model, batch: tuple[Any, ...], training: bool) -> Pair:
            return _checked(task(model, batch, training=training))
    else:
        def run(model: keras.Model, batch: tuple[Any, ...], training: bool) -> Pair:
            return _checked(Phase(task, model)(batch, training=training))
    return run


def _checked(pair: Any) -> Pair:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UserError(f"task returned a {type(pair).__name__}", "(loss_sum, weight)", "mend the model file's task")
    for value in pair:
        if not (tf.is_tensor(value) or hasattr(value, "shape") or isinstance(value, (int, float))):
            raise UserError(f"task returned a {type(value).__name__} in its pair", "two scalars (loss_sum, weight)",
                            "mend the model file's task")
    loss_sum, weight = (tf.cast(v, _wide(v)) for v in map(tf.convert_to_tensor, pair))
    if loss_sum.shape.rank or weight.shape.rank:
        raise UserError(f"task returned shapes {tuple(loss_sum.shape)} and {tuple(weight.shape)}",
                        "two scalars (loss_sum, weight)", "sum the loss in the model file's task")
    return loss_sum, weight


class Phase(keras.layers.Layer):
    """Runs ``function(model, batch)`` as a Keras layer, so that every layer called inside knows whether it trains.

    Keras also forgets what the model's layers added to the loss in the call before.
    """

    def __init__(self, function: Callable[[Any, Any], Any], model: keras.Model) -> None:
        super().__init__(name="phase", autocast=False)
        self._function, self._model = function, model
        self.built = True

    def call(self, batch: Any, training: bool = False) -> Any:
        """Call the function; ``training`` reaches nested layers through Keras' call context."""
        return self._function(self._model, batch)


def resolve_loss(named: Named, model: keras.Model) -> Loss:
    """Return ``loss(y, outputs)`` without reduction: config's, else the compiled model's, else by the targets' type."""
    if named.name != "auto":
        return losses.by_name(named)
    own = getattr(model, "loss", None) if getattr(model, "compiled", False) else None
    if own is None:
        return shapes.guarded(_auto(named.args), "auto")
    if not isinstance(own, str):
        raise UserError(f"loss.args {named.args} beside a loss that model.compile was given ready made",
                        "one of the two", "leave loss.args empty")
    return losses.by_name(Named(own, named.args))


def loss_name(spec: Any, config: Config) -> str:
    """In words, for the summary."""
    if spec.task is not None:
        return "the model file's task"
    if config.loss.name != "auto":
        return config.loss.name
    loss = getattr(spec.model, "loss", None) if getattr(spec.model, "compiled", False) else None
    if loss is None:
        return "by the targets: sparse categorical cross entropy of logits, or squared error"
    return ", ".join(_name_of(part) for part in keras.tree.flatten(loss) if part is not None)


def _name_of(loss: Any) -> str:
    if isinstance(loss, str):
        return loss
    return str(getattr(loss, "name", getattr(loss, "__name__", "as compiled")))


def _auto(args: dict[str, Any]) -> Loss:
    """Cross entropy of logits for integer targets, squared error for others; decided when the graph is traced."""
    def loss(y: Any, outputs: Any) -> Any:
        if not y.dtype.is_integer:
            return keras.losses.MeanSquaredError(**{"reduction": None, **args})(y, outputs)
        if outputs.shape.rank < 2 or outputs.shape[-1] == 1:
            raise UserError(f"the targets are integers and the model's outputs have shape {tuple(outputs.shape)}",
                            "one output per class", "set loss, for example to BinaryCrossentropy")
        settings = {"from_logits": True, "reduction": None, **args}
        return keras.losses.SparseCategoricalCrossentropy(**settings)(y, outputs)
    return loss
