"""The loss of a Keras model as a sum over samples, by Keras' own names.

A model file's own ``task(model, batch) -> (loss_sum, weight)`` comes before everything here and owns all of the loss.
Without one the loss is evaluated per element, averaged over a sample's trailing dimensions, weighted by the batch's
third array if there is one, and summed over the samples; the weight is the number of samples. What layers add
(``model.losses``: regularisers, ``add_loss``) counts once per sample, so that it counts once after the division by
the global weight.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import Config, Named
from hvdtrain.errors import UserError, nearest

Pair = tuple[Any, Any]
Loss = Callable[[Any, Any], Any]
Task = Callable[[Any, tuple[Any, ...], bool], Pair]


def make_task(spec: Any, config: Config) -> Task:
    """Return ``task(model, batch, training) -> (loss_sum, weight)``, two scalars; `UserError` for an unknown loss."""
    if spec.task is not None:
        return _users(spec.task)
    _refuse_own_training(spec.model)
    loss = resolve_loss(config.loss, spec.model)

    def task(model: keras.Model, batch: tuple[Any, ...], training: bool) -> Pair:
        return default_pair(loss, model, model(batch[0], training=training), batch)

    return task


def default_pair(loss: Loss, model: keras.Model, outputs: Any, batch: tuple[Any, ...]) -> Pair:
    """(sum over samples, number of samples) for ``outputs`` of shape (B, ...) and batch (x, y[, sample_weight])."""
    if len(batch) not in (2, 3):
        raise UserError(f"a batch has {len(batch)} arrays", "(x, y) or (x, y, sample_weight)",
                        "return two or three arrays from the data, or give the model file a task(model, batch)")
    if not tf.is_tensor(outputs):
        raise UserError(f"the model returns a {type(outputs).__name__}", "one tensor, where the loss is by name",
                        "give the model file a task(model, batch) -> (loss_sum, weight)")
    n = tf.shape(outputs)[0]
    per_sample_B = loss(batch[1], outputs)
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
        return _by_name(named)
    compiled = getattr(model, "loss", None) if getattr(model, "compiled", False) else None
    if compiled is None:
        return _auto(named.args)
    if isinstance(compiled, (dict, list, tuple)):
        if len(keras.tree.flatten(compiled)) == 1:
            compiled = keras.tree.flatten(compiled)[0]
    if isinstance(compiled, (dict, list, tuple)):
        raise UserError("the model was compiled with several losses", "one loss, or a task",
                        "give the model file a task(model, batch) -> (loss_sum, weight)")
    loss = _by_name(Named(compiled, named.args)) if isinstance(compiled, str) else _unreduced(compiled)
    factor = _loss_weight(model)
    return loss if factor is None else lambda y, outputs: loss(y, outputs) * factor


def _loss_weight(model: keras.Model) -> float | None:
    """What `compile(loss_weights=...)` gave for the only loss; None for nothing."""
    given = getattr(getattr(model, "_compile_loss", None), "_user_loss_weights", None)
    if given is None:
        return None
    factors = keras.tree.flatten(given)
    if len(factors) != 1 or not isinstance(factors[0], (int, float)):
        raise UserError(f"the model was compiled with loss_weights {given} for one loss", "one number",
                        "compile with one, or give the model file a task(model, batch) -> (loss_sum, weight)")
    return float(factors[0])


def _refuse_own_training(model: keras.Model) -> None:
    """Raise `UserError` for a model whose own methods compute a loss, which would be ignored here."""
    for name in ("compute_loss", "train_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise UserError(f"{type(model).__name__} overrides {name}(), which is not called here",
                            "a loss by name, or a task",
                            "give the model file a task(model, batch) -> (loss_sum, weight)")


def loss_name(spec: Any, config: Config) -> str:
    """In words, for the summary."""
    if spec.task is not None:
        return "the model file's task"
    if config.loss.name != "auto":
        return config.loss.name
    compiled = getattr(spec.model, "loss", None) if getattr(spec.model, "compiled", False) else None
    if compiled is None:
        return "by the targets: sparse categorical cross entropy of logits, or squared error"
    if isinstance(compiled, str):
        return compiled
    return getattr(compiled, "name", getattr(compiled, "__name__", "as compiled"))


def _unreduced(loss: Any) -> Loss:
    """A Keras loss object without its reduction; a plain function as it is."""
    if isinstance(loss, keras.losses.Loss):
        loss = copy.copy(loss)
        loss.reduction = None
    return loss


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


def _by_name(named: Named) -> Loss:
    """A class or function of keras.losses, any case, with or without underscores."""
    key = named.name.lower().replace("_", "")
    if key in ("crossentropy", "ce"):
        raise UserError(f"loss {named.name!r} leaves open which cross entropy", "its full name",
                        "name binary_crossentropy, categorical_crossentropy or sparse_categorical_crossentropy")
    classes = {n.lower(): c for n, c in vars(keras.losses).items()
               if isinstance(c, type) and issubclass(c, keras.losses.Loss) and c is not keras.losses.Loss}
    functions = {n.lower().replace("_", ""): f for n, f in vars(keras.losses).items()
                 if inspect.isfunction(f) and n not in ("get", "serialize", "deserialize")}
    if key not in classes and key not in functions:
        with contextlib.suppress(ValueError):  # Keras' short names, such as mse
            functions[key] = keras.losses.get(named.name.lower())
    if key not in classes and key not in functions:
        raise UserError(f"loss {named.name!r} is not in keras.losses",
                        nearest(named.name, [c.__name__ for c in classes.values()]), "correct loss.name")
    try:
        if key in classes:
            return classes[key](**{**named.args, "reduction": None})
        function = functions[key]
        inspect.signature(function).bind(None, None, **named.args)
        return lambda y, outputs: function(y, outputs, **named.args)
    except (TypeError, ValueError) as error:
        raise UserError(f"loss {named.name} refused its args {named.args}: {error}", "keyword arguments it knows",
                        "correct loss.args") from None
