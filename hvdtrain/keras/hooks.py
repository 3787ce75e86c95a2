"""Change Keras' classes where Keras decides beside a distributed optimizer: loss scales, XLA, comparisons, shards.

Each change is made once, with the first distributed optimizer, and has no effect on other optimizers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import textwrap
import warnings
import weakref
from typing import Any, Literal

import keras
import numpy as np

from hvdtrain import tensorflow as hvd
from hvdtrain.backends.tensorflow.buffers import LARGE, state_variables
from hvdtrain.backends.tensorflow.nodes import node_errors
from hvdtrain.backends.tensorflow.state import to_numpy
from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.errors import UserError
from hvdtrain.keras import data
from hvdtrain.keras.data import ShardedDataset, check_shard
from hvdtrain.keras.exchange import OptimizerExchange, exchange_of, tf_variable
from hvdtrain.keras.guard import EARLY, GuardCallback
from hvdtrain.tensorflow import functions

_seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Models whose steps were looked at while they were traced, and whether for even parts only, which ask for less."""


def install() -> None:
    if getattr(keras.optimizers.LossScaleOptimizer.apply, "of_hvdtrain", False):
        return
    _scale_after_exchange(keras.optimizers.LossScaleOptimizer)
    _auto_without_xla(_owner(keras.Model, "_resolve_auto_jit_compile"))
    _compare_between_steps(_owner(keras.Model, "make_train_function"))
    _compare_after_epochs(_owner(keras.Model, "fit"))
    _look_at_shards(_owner(keras.Model, "fit"), _owner(keras.Model, "compute_loss"))


def _owner(cls: type, name: str) -> type:
    return next(c for c in cls.__mro__ if name in vars(c))


def _scale_after_exchange(cls: Any) -> None:
    # Keras skips the inner optimizer where *this rank's* gradients are not finite: ranks would skip different steps,
    # and the others would wait for ever.
    plain = cls.apply

    @functools.wraps(plain)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        exchange = exchange_of(self.inner_optimizer)
        if exchange is None or exchange.inside:
            return plain(self, grads, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        return exchange.step(self, grads, variables, lambda reduced: plain(self, reduced, variables))
    apply.of_hvdtrain = True  # type: ignore[attr-defined]
    cls.apply = apply


def _auto_without_xla(cls: Any) -> None:
    # "auto" takes XLA where there is a GPU; Horovod's operations have no XLA kernels.
    plain = cls._resolve_auto_jit_compile

    @functools.wraps(plain)
    def resolve(self: Any) -> bool:
        exchange = exchange_of(getattr(self, "optimizer", None))
        return False if exchange is not None and exchange.ranks > 1 else plain(self)
    cls._resolve_auto_jit_compile = resolve


def _compare_between_steps(cls: Any) -> None:
    # Between steps a comparison costs less than inside (3 to 5 % of a step of 6 ms), and raises its own exception.
    plain = cls.make_train_function

    @functools.wraps(plain)
    def make(self: Any, force: bool = False) -> Any:
        made = self.train_function is None or force
        out = plain(self, force)
        exchange = exchange_of(getattr(self, "optimizer", None))
        if made and exchange is not None and exchange.ranks > 1:
            if self.jit_compile:
                raise UserError("model.compile(jit_compile=True) with hvd.DistributedOptimizer",
                                "no XLA: Horovod's operations have no XLA kernels",
                                "pass jit_compile=False to model.compile")
            self.train_function, exchange.model = _guarded(self, self.train_function, exchange), self
        return self.train_function if out is not None else None
    cls.make_train_function = make


def _compare_after_epochs(cls: Any) -> None:
    plain = cls.fit
    takes = inspect.signature(plain)

    @functools.wraps(plain)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = exchange_of(getattr(self, "optimizer", None))
        if exchange is None or exchange.ranks == 1:
            return plain(self, *args, **kwargs)
        given = takes.bind(self, *args, **kwargs)
        own, guard = given.arguments.get("callbacks"), GuardCallback(exchange.guard)
        if not isinstance(own, keras.callbacks.CallbackList):
            given.arguments["callbacks"] = [*keras.tree.flatten(own or []), guard]
            return plain(*given.args, **given.kwargs)
        guard.set_model(self)
        guard.set_params(own.params)
        own.callbacks.append(guard)
        try:
            return plain(*given.args, **given.kwargs)
        finally:
            own.callbacks.remove(guard)
    cls.fit = fit


def _look_at_shards(fits: Any, loses: Any) -> None:
    plain_fit, plain_loss = fits.fit, loses.compute_loss

    @functools.wraps(plain_fit)
    def fit(self: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        held_out = kwargs.get("validation_data")
        shards = [one for one in (x, held_out) if isinstance(one, ShardedDataset)]
        if isinstance(x, ShardedDataset):
            _refuse_class_weight(plain_fit, self, x, *args, **kwargs)
        exchange = exchange_of(getattr(self, "optimizer", None))
        if not shards or exchange is None:
            _seen.pop(self, None)
            return plain_fit(self, x, *args, **kwargs)
        data.check_losses(self)
        for step, shard in zip(STEPS, (x, held_out)):
            if isinstance(shard, ShardedDataset):
                check(self, step, shard)
        even = all(shard.even() for shard in shards)
        if _seen.get(self) not in (False, even):
            self.train_function = self.test_function = None
        _seen[self] = even
        try:
            with data.reading(shards), data.weighing(x):
                if isinstance(x, ShardedDataset):
                    check_shard(self, x, exchange.ranks)
                return plain_fit(self, x, *args, **kwargs)
        except UserError:  # a step whose first trace was refused takes no other
            _seen.pop(self, None)
            self.train_function = self.test_function = None
            raise

    @functools.wraps(plain_loss)
    def compute_loss(self: Any, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        data.check_batch(self, y_pred, args[0] if args else kwargs.get("sample_weight"))
        return plain_loss(self, x, y, y_pred, *args, **kwargs)
    fits.fit, loses.compute_loss = fit, compute_loss
    fits.evaluate, fits.test_on_batch = _weighing(fits.evaluate), _weighing(fits.test_on_batch)


def _weighing(plain: Any) -> Any:
    """Wrap ``plain``, which reads the data ``x``, in `hvdtrain.keras.data.weighing`: callbacks of a fit call it.
    """
    @functools.wraps(plain)
    def read(self: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        with data.weighing(x):
            return plain(self, x, *args, **kwargs)
    return read


def _refuse_class_weight(fit: Any, *args: Any, **kwargs: Any) -> None:
    arguments = inspect.signature(fit).bind(*args, **kwargs).arguments
    if arguments.get("class_weight") is not None:
        raise UserError("fit(hvd.shard(...), class_weight=...)", "class weights in the shard, which multiplies "
                        "sample weights by class weights", "write hvd.shard(x, y, class_weight=...), and leave "
                                                           "class_weight out of fit")


def _guarded(model: Any, function: Any, exchange: OptimizerExchange) -> Any:
    """Add to a function of one or more steps the broadcast of what layers wrote, and the comparison if due."""

    calls, written = itertools.count(), WrittenVariables(model, exchange)

    @functools.wraps(function)
    def train(iterator: Any) -> Any:
        pulse.at("fit", next(calls) * model.steps_per_execution)
        written.before()
        with exchange.guard.driven(), node_errors():
            out = function(iterator)
            written.after()
        exchange.guard.between_steps(model.steps_per_execution / exchange.settings.passes)
        return out
    return train


class WrittenVariables:
    """Find the variables that layers write in forward passes, and give all ranks one value after each call of ``fit``.

    Compares values before and after the first, second, eighth and every N-th call (``check_every``); later callbacks'
    changes do not count. Then every rank takes the lowest rank's values after each call. BatchNorm's statistics, random
    generators and metrics stay each rank's own, as in Horovod.
    """

    def __init__(self, model: Any, exchange: OptimizerExchange) -> None:
        self._model, self._exchange = model, exchange
        self._before: dict[str, np.ndarray] = {}
        self._known: list[str] = []
        self._calls = 0

    def before(self) -> None:
        """Keep the values before a call that is compared."""
        self._calls += 1
        every = self._exchange.settings.check_every
        due = self._calls in (1, *EARLY) or every and self._calls % every == 0
        self._before = {name: to_numpy(v) for name, v in self._variables().items()} if due and self._model.built else {}

    def after(self) -> None:
        """Take the lowest rank's values of written variables; collective."""
        if not (self._before or self._known):
            return
        variables = self._variables()
        if self._before:
            self._look(variables)
        if self._known:
            process_set = self._exchange.settings.process_set
            root = (getattr(process_set, "ranks", None) or [0])[0]
            hvd.broadcast_variables([tf_variable(variables[name]) for name in self._known], root_rank=root,
                                    process_set=process_set)

    def _look(self, variables: dict[str, Any]) -> None:
        own = [name for name, before in self._before.items()
               if name not in self._known and before.tobytes() != to_numpy(variables[name]).tobytes()]
        found = functions.gathered(own, self._exchange.settings.process_set)
        fresh = [name for name in self._before if any(name in names for names in found)]
        self._known += fresh
        if fresh and hvd.rank() == 0:
            warnings.warn(f"layers write to {', '.join(fresh)} in their forward passes: every rank "
                          "takes rank 0's value after each step, so training depends on the number of "
                          "ranks", stacklevel=2)

    def _variables(self) -> dict[str, Any]:
        local = {id(v) for layer in self._exchange.settings.local_layers for v in layer.variables}
        found = [v for v in state_variables(self._model) if id(v) not in local and math.prod(v.shape) < LARGE]
        return {f"{v.path}#{i}" if any(v.path == w.path for w in found[:i]) else v.path: v
                for i, v in enumerate(found)}


STEPS = ("train_step", "test_step")
UNPACK = "unpack_x_y_sample_weight"
Taken = Literal["pairs", "unweighted", "weighted", "unknown"]


def check(model: Any, name: str, shard: ShardedDataset) -> None:
    """Refuse (`UserError`) a custom step ``name`` that fails on sample weights or drops them, unless all are 1."""
    step = getattr(type(model), name)
    if step is getattr(keras.Model, name):
        return
    try:
        how = taken(inspect.getsource(inspect.unwrap(step)))
    except (OSError, TypeError, SyntaxError):
        return
    if how == "pairs" or how == "unweighted" and not shard.of_ones():
        does = "unpacks only two elements of a batch" if how == "pairs" else "drops the sample weights of a batch"
        raise UserError(f"{type(model).__name__}.{name} {does} of hvdtrain.keras.shard",
                        "x, y and sample_weight, which makes the mean over ranks that of the global batch",
                        f"write x, y, sample_weight = keras.utils.{UNPACK}(data) in {name}, and give sample_weight "
                        "to compute_loss")


def taken(source: str) -> Taken:
    """Return how a step's source takes its batch: two elements, three with the weights unread, or with them read."""
    function = next((node for node in ast.walk(ast.parse(textwrap.dedent(source)))
                     if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
    if function is None or len(function.args.args) < 2:  # a lambda
        return "unknown"
    data = function.args.args[1].arg
    if any(isinstance(node, ast.Name) and node.id == data and isinstance(node.ctx, ast.Store)
           for node in ast.walk(function)):
        return "unknown"  # what is taken apart may be another batch
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unpacked = [node.targets[0].elts for node in ast.walk(function) if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], (ast.Tuple, ast.List)) and _is_batch(node.value, data)]
    if unpacked:
        most = max(unpacked, key=len)
        last = most[-1].value if isinstance(most[-1], ast.Starred) else most[-1]
        if len(most) == 2 and last is most[-1]:
            return "pairs"
        return "unweighted" if isinstance(last, ast.Name) and last.id not in read else "weighted"
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == data]
    indices = [node.slice.value for node in ast.walk(function) if isinstance(node, ast.Subscript)
               and isinstance(node.value, ast.Name) and node.value.id == data and isinstance(node.slice, ast.Constant)]
    if not uses or len(indices) < len(uses):
        return "unknown"
    return "weighted" if 2 in indices else "unweighted"


def _is_batch(value: ast.expr, data: str) -> bool:
    """Return whether an expression is the parameter ``data``, or Keras' unpacking of it."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == UNPACK and value.args:
        value = value.args[0]
    return isinstance(value, ast.Name) and value.id == data
