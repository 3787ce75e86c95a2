"""A Keras run as named numpy arrays and back, bit by bit.

A name is the variable's place in the model's order and its path: ``00003/cnn/conv_0/conv/kernel``. The place decides;
of the path Keras' own counters (``dense_7``) are not compared, because they go on counting within a process.
bfloat16, which numpy lacks, travels as its bits in uint16.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import rng
from hvdtrain.backends.tensorflow.transforms.precision import own_types
from hvdtrain.errors import UserError
from hvdtrain.precision.scaler import LossScale
from hvdtrain.protocols.state import Place, Window

if TYPE_CHECKING:
    from hvdtrain.backends.tensorflow.buffers import Buffers
    from hvdtrain.backends.tensorflow.optim import Optimization

_COUNTER = re.compile(r"_\d+(?=[/_]|$)")


def to_numpy(variable: Any) -> np.ndarray:
    """A copy on the host of a Keras variable or a tensor."""
    array = np.asarray((variable.value if isinstance(variable, keras.Variable) else variable).numpy())
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def view(variable: Any) -> np.ndarray:
    """What `to_numpy` returns, without a copy where it is in host memory; good until the variable changes."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if isinstance(value, tf.Variable):  # what read_value does, without the three quarters of its time that are Python
        value = tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)
    try:
        return np.asarray(memoryview(value))
    except (ValueError, TypeError, BufferError):  # a type that Python's buffers lack, such as bfloat16
        return to_numpy(value)


def assign(variable: Any, array: np.ndarray) -> None:
    """Undo `to_numpy`."""
    if keras.backend.standardize_dtype(variable.dtype) == "bfloat16" and array.dtype == np.uint16:
        array = array.view(tf.bfloat16.as_numpy_dtype)
    variable.assign(array)


def without_counters(name: str) -> str:
    """A variable's path without Keras' counters: ``dense/kernel`` for ``dense_7/kernel``."""
    return _COUNTER.sub("", name)


def named(variables: Sequence[Any]) -> dict[str, Any]:
    """Variables by place and path."""
    return {f"{i:05d}/{v.path}": v for i, v in enumerate(variables)}


def arrays(variables: Sequence[Any], group: str = "", place: Place | None = None) -> dict[str, np.ndarray]:
    """`named`, as copies, in the memory that ``place`` gives; not copied where it gives None."""
    if place is None:
        return {name: to_numpy(v) for name, v in named(variables).items()}
    out = {}
    for name, variable in named(variables).items():
        value = view(variable)
        memory = place(group, name, value.shape, value.dtype)
        if isinstance(memory, Window):
            begin, memory = memory
            value = value.reshape(-1)[begin:begin + memory.size]
        if memory is not None:
            np.copyto(memory, value)
        out[name] = value if memory is None else memory
    return out


def load(what: str, variables: Sequence[Any], got: dict[str, np.ndarray]) -> None:
    """Assign arrays to ``variables`` after all of them were checked; `UserError` names the first that does not fit."""
    own = named(variables)
    given = dict(sorted(got.items()))
    plain = [without_counters(name) for name in own]
    if plain != [without_counters(name) for name in given]:
        missing = [n for n in own if without_counters(n) not in {without_counters(g) for g in given}]
        extra = [g for g in given if without_counters(g) not in set(plain)]
        raise UserError(f"the checkpoint's {what} lacks {missing[:3]} and has {extra[:3]} besides",
                        f"the {len(own)} variables of this {what}", "resume with the model and optimizer of that run")
    for (name, variable), array in zip(own.items(), given.values()):
        if tuple(variable.shape) != tuple(array.shape):
            raise UserError(f"checkpoint variable {name} has shape {tuple(array.shape)}",
                            f"{tuple(variable.shape)}, as in this {what}",
                            "resume with the model and model_args of that run")
    for variable, array in zip(own.values(), given.values()):
        assign(variable, array)


def seed_states(model: keras.Model) -> dict[str, Any]:
    """The states of the model's random generators by place and path: what is neither a weight nor a metric."""
    counted = {id(v) for v in (*model.weights, *model.metrics_variables)}
    own = [v for v in model.variables if id(v) not in counted]
    return named([v for v in own if v.path.rpartition("/")[2].startswith("seed_generator_state")])


def random_arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """Every random generator of this process that can be read: Python's, numpy's, the model's."""
    return {**rng.capture(), **{f"seed.{name}": to_numpy(v) for name, v in seed_states(model).items()}}


def load_random(model: keras.Model, own: dict[str, np.ndarray]) -> None:
    """Undo `random_arrays`."""
    rng.restore(own)
    load("random generators", list(seed_states(model).values()),
         {name.removeprefix("seed."): a for name, a in own.items() if name.startswith("seed.")})


class ModelState:
    """Implements `hvdtrain.protocols.ModelState`."""

    def __init__(self, model: keras.Model, opt: Optimization, scale: LossScale, buffers: Buffers) -> None:
        self._model, self._opt, self._scale, self._buffers = model, opt, scale, buffers

    def state(self, place: Place | None = None) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """Return groups "model" and "optimizer" (with its count of updates); optimizer, base rate and loss scale."""
        own = self._opt.optimizer
        groups = {"model": arrays(self._model.weights, "model", place),
                  "optimizer": arrays(own.variables, "optimizer", place)}
        return groups, {"optimizer": type(own).__name__, "base_lr": self._opt.base_lr, **self._scale.state()}

    def state_bytes(self) -> int:
        """Return the bytes of all variables, which a Keras optimizer has from the start."""
        held = (*self._model.weights, *self._opt.optimizer.variables)
        return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in held)

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`; a base rate that is configured otherwise now takes effect."""
        own = type(self._opt.optimizer).__name__
        if rest.get("optimizer", own) != own:
            raise UserError(f"the checkpoint was made with {rest['optimizer']}", own,
                            "resume with the optimizer of that run")
        load("model", self._model.weights, groups["model"])
        load("optimizer", self._opt.optimizer.variables, groups["optimizer"])
        self._opt.resume(rest.get("base_lr"))
        self._scale.load(rest)
        self._buffers.restart()

    def rank_state(self) -> dict[str, np.ndarray]:
        """Return this rank's random generators."""
        return random_arrays(self._model)

    def load_rank(self, own: dict[str, np.ndarray]) -> None:
        """Undo `rank_state`."""
        load_random(self._model, own)

    def export(self, directory: Path) -> list[str]:
        """Write model.safetensors and Keras' own file; return their names.

        The latter is model.keras, or model.weights.h5 for a model whose class Keras cannot describe. With use_ema the
        averaged weights are written, as `keras.Model.fit` leaves them.
        """
        trained, own = self._model.trainable_variables, self._opt.optimizer
        weights = [to_numpy(v) for v in trained]
        if own.use_ema:
            own.finalize_variable_values(trained)
        try:
            with own_types(self._model):
                return _write(self._model, Path(directory))
        finally:
            if own.use_ema:
                for variable, array in zip(trained, weights):
                    assign(variable, array)


def _write(model: keras.Model, directory: Path) -> list[str]:
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}
    for variable in model.weights:
        name, n = variable.path, 1
        while name in tensors:
            name, n = f"{variable.path}#{n}", n + 1
        tensors[name] = np.asarray(variable.value.numpy(), order="C")
    save_file(tensors, str(directory / "model.safetensors"))
    whole, only_weights = directory / "model.keras", directory / "model.weights.h5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.save(whole)
            return ["model.safetensors", whole.name]
        except (NotImplementedError, TypeError, ValueError):
            whole.unlink(missing_ok=True)
            model.save_weights(only_weights)
            return ["model.safetensors", only_weights.name]
