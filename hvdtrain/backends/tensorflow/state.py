"""A Keras run as named numpy arrays and back, bit by bit.

A name is the variable's place in the model's order and its path: ``00003/cnn/conv_0/conv/kernel``. The place decides;
Keras' own counters (``dense_7``) are not compared. bfloat16, which numpy lacks, travels as its bits in uint16.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras import saving
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.transforms.precision import own_types
from hvdtrain.checkpoint import weights
from hvdtrain.checkpoint.tensors import FileLayout, Spec, layout
from hvdtrain.core import rng
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols.run import ArrayWindow, Head, Place, Shard
from hvdtrain.parallel.precision import LossScale

_COUNTER = re.compile(r"_\d+(?=[/_]|$)")


def to_numpy(variable: Any) -> np.ndarray:
    """Return a copy on the host of a Keras variable or a tensor."""
    array = np.asarray((variable.value if isinstance(variable, keras.Variable) else variable).numpy())
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def view(variable: Any) -> np.ndarray:
    """Return `to_numpy` without a copy if the value is in host memory; valid until the variable changes."""
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


def nbytes(variables: Sequence[Any]) -> int:
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def without_counters(name: str) -> str:
    """Return a variable's path without Keras' counters: ``dense/kernel`` for ``dense_7/kernel``."""
    return _COUNTER.sub("", name)


def named(variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by place and path."""
    return {f"{i:05d}/{v.path}": v for i, v in enumerate(variables)}


def export_names(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable: its path, with a number if another has the same."""
    names: dict[str, None] = {}
    for variable in variables:
        name, n = variable.path, 1
        while name in names:
            name, n = f"{variable.path}#{n}", n + 1
        names[name] = None
    return list(names)


def arrays(variables: Mapping[str, Any], group: str = "", place: Place | None = None) -> dict[str, np.ndarray]:
    """Return copies by name, in the memory that ``place`` gives; not copied if it gives None."""
    if place is None:
        return {name: to_numpy(v) for name, v in variables.items()}
    return {name: copied(view(variable), group, name, place) for name, variable in variables.items()}


def copied(value: np.ndarray, group: str, name: str, place: Place | None) -> np.ndarray:
    """Return a copy of ``value`` in the memory that ``place`` gives, or new memory; ``value`` if it gives None."""
    memory = np.empty(value.shape, value.dtype) if place is None else place(group, name, value.shape, value.dtype)
    if isinstance(memory, ArrayWindow):
        begin, memory = memory
        value = value.reshape(-1)[begin:begin + memory.size]
    if memory is None:
        return value
    np.copyto(memory, value)
    return memory


def matched(what: str, own: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return each own name's in a checkpoint, by names and shapes, in order; `UserError` names the first unfit one."""
    names = sorted(given)
    plain = [without_counters(name) for name in own]
    in_order = [[without_counters(name).partition("/")[2] for name in side] for side in (own, names)]
    if in_order[0] != in_order[1]:
        missing = [n for n in own if without_counters(n) not in {without_counters(g) for g in names}]
        extra = [g for g in names if without_counters(g) not in set(plain)]
        raise UserError(f"the checkpoint's {what} lacks {missing[:3]} and also has {extra[:3]}",
                        f"the {count(len(own), 'variable')} of this {what}",
                        "resume with the model and optimizer of that run")
    for name, other in zip(own, names):
        if own[name] != given[other]:
            raise UserError(f"checkpoint variable {name} has shape {given[other]}", f"{own[name]}, as in this {what}",
                            "resume with the model and model_args of that run")
    return dict(zip(own, names))


def load(what: str, variables: Sequence[Any], got: dict[str, np.ndarray]) -> None:
    """Assign arrays to ``variables`` after all of them were checked; `UserError` names the first that does not fit."""
    own = named(variables)
    names = matched(what, {name: tuple(v.shape) for name, v in own.items()},
                    {name: tuple(array.shape) for name, array in got.items()})
    for name, variable in own.items():
        assign(variable, got[names[name]])


def of_other_settings(model: keras.Model, own: Iterable[str], given: Iterable[str]) -> frozenset[str]:
    """Return the names of the optimizer's variables that only one of two runs has, ``own`` or the checkpoint's.

    Settings decide which slots there are for every variable (momentum, velocity_hat), and whether the rate is one.
    """
    stems = sorted({without_counters(v.path.replace("/", "_")) + "_" for v in model.weights}, key=len, reverse=True)

    def slot(name: str) -> str:
        leaf = without_counters(name.rpartition("/")[2])
        alone = leaf if leaf == "learning_rate" else ""
        return next((leaf.removeprefix(stem) for stem in stems if leaf.startswith(stem)), alone)

    sides = [{name: slot(name) for name in names} for names in (own, given)]
    return frozenset(name for side, other in (sides, sides[::-1]) for name, word in side.items()
                     if word and word not in other.values())


def seed_states(model: keras.Model) -> dict[str, Any]:
    """Return the states of the model's random generators by place and path: neither weights nor metrics."""
    counted = {id(v) for v in (*model.weights, *model.metrics_variables)}
    own = [v for v in model.variables if id(v) not in counted]
    return named([v for v in own if v.path.rpartition("/")[2].startswith("seed_generator_state")])


def draws(model: keras.Model) -> bool:
    """Return whether a layer of ``model`` draws from its generator in training; RNNs have one without dropout too."""
    def rates(layer: Any) -> list[float]:
        given = (getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout", "stddev"))
        return [rate for rate in given if isinstance(rate, (int, float)) and not isinstance(rate, bool)]
    return any(layer._seed_generators and (not rates(layer) or any(rates(layer))) for layer in model._flatten_layers())


def random_arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """Return every random generator of this process that can be read: Python's, numpy's, the model's."""
    return {**rng.capture(), **{f"seed.{name}": to_numpy(v) for name, v in seed_states(model).items()}}


def load_random(model: keras.Model, own: dict[str, np.ndarray]) -> None:
    """Undo `random_arrays`."""
    rng.restore(own)
    load("random generators", list(seed_states(model).values()),
         {name.removeprefix("seed."): a for name, a in own.items() if name.startswith("seed.")})


class ModelState:
    """Implements `hvdtrain.core.protocols.ModelState`. ``rank``: rank 0 gives what no owner of a slice does.

    ``restart``: forgets the number of samples of the buffers' statistics, which a checkpoint makes equal on all ranks.
    """

    def __init__(self, model: keras.Model, opt: Optimization, scale: LossScale, restart: Callable[[], None],
                 rank: int = 0) -> None:
        self._model, self._opt, self._scale, self._restart, self._rank = model, opt, scale, restart, rank
        self._names: dict[str, str] = {}
        self._rests: list[Mapping[str, Any]] = []
        self._alone: frozenset[str] = frozenset()
        self.finalized = False
        self.facts: Callable[[], dict[str, Any]] = dict

    def state(self, place: Place | None = None) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        groups = {"model": arrays(self._named("model", self._model.weights), "model", place)}
        if self._opt.slices is None:
            groups["optimizer"] = arrays(self._named("optimizer", self._opt.optimizer.variables), "optimizer", place)
        return groups, self.rest()

    def _named(self, group: str, variables: Sequence[Any]) -> dict[str, Any]:
        """Return ``variables`` by their names in a checkpoint."""
        return named(variables)

    def rest(self) -> dict[str, Any]:
        """Return the numbers and settings of optimizer and loss scale, JSON-able."""
        plateau = self._opt.plateau()
        return {"optimizer": type(self._opt.optimizer).__name__, "base_lr": self._opt.base_lr,
                "settings": self._opt.settings(), **({} if plateau is None else {"plateau": plateau.state()}),
                **self._scale.state(), **self.facts()}

    def state_bytes(self) -> int:
        return nbytes((*self._model.weights, *self._opt.optimizer.variables))

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        own = type(self._opt.optimizer).__name__
        if rest.get("optimizer", own) != own:
            raise UserError(f"the checkpoint was made with {rest['optimizer']}", own,
                            "resume with the optimizer of that run")
        self._assign(groups, rest)
        if self._opt.slices is not None:
            self._rests = [rest]  # the rate comes with the slices
        self._scale.load(rest)
        self._restart()

    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        load("model", self._model.weights, arrays)
        self._restart()

    def _assign(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Assign the arrays of a checkpoint."""
        load("model", self._model.weights, groups["model"])
        if self._opt.slices is None:
            held, given = named(self._opt.optimizer.variables), groups["optimizer"]
            alone = of_other_settings(self._model, held, given)
            load("optimizer", [v for name, v in held.items() if name not in alone],
                 {name: array for name, array in given.items() if name not in alone})
            self._begin({name: held[name] for name in held if name in alone}, rest)

    def _begin(self, alone: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Give variables of the optimizer that the checkpoint lacks their first values, and the rate its own."""
        own = {without_counters(v.path.replace("/", "_")) + "_average": v for v in self._model.weights}
        of_rate = {name for name in alone if name.endswith("learning_rate")}
        for name in alone.keys() - of_rate:
            average = own.get(without_counters(name.rpartition("/")[2]))  # of use_ema, which starts with the weights
            assign(alone[name], np.zeros(tuple(alone[name].shape)) if average is None else to_numpy(average))
        self._opt.resume(rest, not of_rate)

    def take(self, optimizer: Any, spans: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the optimizer over slices has taken the place of the whole one."""
        assert self._opt.slices is not None and optimizer.spans == list(spans)

    def _slices(self) -> Iterator[tuple[str, Any, tuple[int, ...], int, int]]:
        """Yield (name, variable, whole shape, begin, end) of each of the optimizer's variables."""
        assert self._opt.slices is not None
        variables = self._opt.optimizer.variables
        names = self._opt.names or self._named("optimizer", variables)
        for place, (name, variable) in enumerate(zip(names, variables)):
            part = self._opt.slices.get(place)
            whole = tuple(variable.shape)
            yield (name, variable, whole, 0, math.prod(whole)) if part is None else (
                name, variable, part.shape, part.begin, part.end)

    def slices(self, place: Place | None = None) -> Iterator[Shard]:
        owned = self._opt.slices or {}
        for number, (name, variable, shape, begin, end) in enumerate(self._slices()):
            if begin < end and (number in owned or self._rank == 0):
                own = view(variable).reshape(-1)
                yield Shard("optimizer", name, shape, begin, copied(own, "optimizer", name, place))

    def wanted(self, heads: Sequence[Head]) -> list[tuple[str, int, int]]:
        own, given = list(self._slices()), {head.name: tuple(head.shape) for head in heads}
        self._alone = of_other_settings(self._model, [name for name, *_ in own], given)
        self._names = matched("optimizer", {name: shape for name, _, shape, _, _ in own if name not in self._alone},
                              {name: shape for name, shape in given.items() if name not in self._alone})
        return [(self._names[name], begin, end) for name, _, _, begin, end in own
                if begin < end and name in self._names]

    def load_slices(self, values: Mapping[str, np.ndarray]) -> None:
        own = {name: variable for name, variable, _, _, _ in self._slices()}
        for name, variable in own.items():
            array = values.get(self._names.get(name, name))
            if array is not None:
                assign(variable, array.reshape(tuple(variable.shape)))
        for rest in self._rests:
            self._begin({name: own[name] for name in own if name in self._alone}, rest)
        self._rests = []

    def rank_state(self) -> dict[str, np.ndarray]:
        return random_arrays(self._model)

    def load_rank(self, own: dict[str, np.ndarray]) -> None:
        load_random(self._model, own)

    def export(self, directory: Path) -> list[str]:
        """Write model.safetensors and Keras' own file; return their names.

        The latter is model.keras, or model.weights.h5 for a model whose class Keras cannot describe. With use_ema the
        averaged weights are written, as `keras.Model.fit` leaves them.
        """
        with self.final(), own_types(self._model):
            return _write(self._model, Path(directory))

    def try_export(self) -> str:
        with own_types(self._model):
            _planned(self._model)
            return saving.left_out(self._model)

    @contextlib.contextmanager
    def final(self) -> Iterator[None]:
        """Use the averaged weights in the body, with use_ema, unless the model has the final weights already."""
        trained, own = self._opt.trained, self._opt.optimizer
        averages = own.use_ema and not self.finalized
        weights = [to_numpy(v) for v in trained] if averages else []
        if averages:
            own.finalize_variable_values(trained)
        try:
            yield
        finally:
            for variable, array in zip(trained, weights):
                assign(variable, array)


def _write(model: keras.Model, directory: Path) -> list[str]:
    plan, variables = _planned(model)
    blocks = (np.ascontiguousarray(view(variables[name])).reshape(-1).view(np.uint8).data for name in plan.names)
    weights.put(plan, blocks, directory / weights.FILE)
    return [weights.FILE, *saving.write(model, directory)]


def _planned(model: keras.Model) -> tuple[FileLayout, dict[str, Any]]:
    """Return the layout of model.safetensors, and its variables by name. `CheckpointError` if no file can hold it."""
    named = dict(zip(export_names(model.weights), model.weights))
    codes: dict[str, str] = {}
    specs: dict[str, Spec] = {}
    for name, variable in named.items():
        dtype = tf.as_dtype(variable.dtype)
        codes |= {name: "BF16"} if dtype == tf.bfloat16 else {}
        specs[name] = Spec(np.dtype(np.uint16 if dtype == tf.bfloat16 else dtype.as_numpy_dtype),
                           tuple(variable.shape))
    return layout(specs, "model", codes), named
