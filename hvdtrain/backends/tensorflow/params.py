"""The trainable variables of a Keras model: singly, as flat buckets, and under an optimizer over slices of them.

Owns how a slice is updated in the middle of its variable. Exchanges are `hvdtrain.parallel.data_parallel`'s.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.facts import apply_gradients
from hvdtrain.backends.tensorflow import ops, state
from hvdtrain.backends.tensorflow.buffers import take_over
from hvdtrain.backends.tensorflow.graphs import PLAIN
from hvdtrain.backends.tensorflow.nodes import host_node
from hvdtrain.backends.tensorflow.ops import HostVector, Ops
from hvdtrain.backends.tensorflow.optim import Optimization, Slice, alike, instead, share
from hvdtrain.backends.tensorflow.optimizer import Optimizer, check_elementwise, fused
from hvdtrain.backends.tensorflow.split import Split
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.parallel.precision import LossScale
from hvdtrain.planning.shards import in_bucket

VIEWED = ("float32", "float64")
"""Types that are looked at in host memory: Python's buffers lack bfloat16."""


class Params:
    """Implements `hvdtrain.core.protocols.Params`; ``blocks``: the model file's; ``opt``: the run's optimizer."""

    def __init__(self, model: keras.Model, opt: Optimization, scale: LossScale, blocks: Sequence[Any] = (),
                 split: Split | None = None) -> None:
        self._model, self._opt, self._scale, self._split = model, opt, scale, split
        self.variables = list(model.trainable_variables)
        self._memory: dict[Bucket, Memory] = {}
        owner: dict[int, int] = {}
        for number, layer in enumerate(blocks):
            for variable in layer.variables:
                owner.setdefault(id(variable), number)
        self.specs = [ParamSpec(name, tuple(v.shape), keras.backend.standardize_dtype(v.dtype),
                                split.place(v) if split else 0, owner.get(id(v), 0))
                      for name, v in state.named(self.variables).items()]

    def made_of(self) -> list[str]:
        """Return a line for each variable of the model, then the optimizer with its schedule and variables.

        Without Keras' own counters in names (``dense_7``), which count within a process.
        """
        def line(kind: str, v: Any) -> str:
            dtype = keras.backend.standardize_dtype(v.dtype)
            return f"{kind} {state.without_counters(v.path)} {dtype}{list(v.shape)}"

        return [*(line("variable" if v.trainable else "frozen variable", v) for v in self._model.weights),
                f"optimizer {self._opt.made_of()}",
                *(line("variable of the optimizer", v) for v in self._opt.optimizer.variables)]

    def frozen(self) -> frozenset[int]:
        """Return nothing: variables that are trainable when a run begins stay so."""
        return frozenset()

    def flat(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> tf.Tensor:
        """Return a copy of the variables of ``bucket`` as one vector (n,).

        Of elements [begin, end), if those are asked for, a view in host memory if they lie in one variable there.
        Whoever holds it makes a later `write` copy the variable.
        """
        pieces = []
        inside = in_bucket(bucket, begin, bucket.n if end is None else end)
        if end is not None and len(inside) == 1 and bucket.dtype in VIEWED:
            i, (a, b) = inside[0]
            return state.view(self.variables[i]).reshape(-1)[a:b].view(HostVector)
        for i, (a, b) in inside:
            flat_N = tf.reshape(self.variables[i].value.read_value(), [-1])
            pieces.append(flat_N if b - a == self.specs[i].n else tf.slice(flat_N, [a], [b - a]))
        return tf.identity(Ops().pack(pieces)) if pieces else tf.zeros([0], bucket.dtype)

    def write(self, bucket: Bucket, flat_N: tf.Tensor, known: tuple[int, int] = (0, 0)) -> None:
        """Undo `flat`, but for the elements ``known``; host memory is copied, else variables would keep it."""
        memory = self._memory_of(bucket)() if isinstance(flat_N, np.ndarray) else []
        for k, (i, begin, shape) in enumerate(zip(bucket.params, bucket.offsets, bucket.shapes)):
            end = begin + self.specs[i].n
            if known[0] <= begin and end <= known[1]:
                continue
            if memory:
                for a, b in ((begin, min(end, known[0])), (max(begin, known[1]), end)):
                    if a < b:
                        memory[k][a - begin:b - begin] = flat_N[a:b]
            elif isinstance(flat_N, np.ndarray):
                _overwrite(self.variables[i].value, flat_N[begin:end].reshape(shape))
            else:
                self.variables[i].assign(tf.reshape(flat_N[begin:end], shape))

    def _memory_of(self, bucket: Bucket) -> Memory:
        """Return the memory of a bucket's variables, in its order; of none unless all are in host memory."""
        if bucket not in self._memory:
            own = [self.variables[i] for i in bucket.params]
            # Of a variable on a GPU numpy gets a copy, to which a write would be lost.
            self._memory[bucket] = memory_of([v.value for v in own]) if all(map(in_host, own)) else list
        return self._memory[bucket]

    def optimizer(self, vectors: Sequence[tf.Variable]) -> Optimizer:
        """Return an optimizer of the run's kind over ``vectors``, variables (n,), with state of its own.

        It uses the run's own rate, also if that is a variable that a callback changes.
        """
        made = copy.copy(self._opt)
        own = self._opt.optimizer
        made.optimizer = type(own).from_config(own.get_config())
        if not callable(own._learning_rate):
            object.__setattr__(made.optimizer, "_learning_rate", own._learning_rate)
        variables = [_as_keras(vector) for vector in vectors]
        made.optimizer.build(variables)
        return Optimizer(made, variables, self._scale)

    def sliced(self, spans: Sequence[tuple[int, int]]) -> Sliced:
        if self._split:
            raise UserError("data_parallel zero with model_parallel and Keras on TensorFlow", "one of the two",
                            "set model_parallel: 1, or data_parallel: replicate")
        return Sliced(self._opt, self.variables, self._scale, spans)


Memory = Callable[[], list[np.ndarray]]
"""Returns the host memory of variables, to write to at once."""


def memory_of(variables: Sequence[tf.Variable]) -> Memory:
    """Return a function for the memory of ``variables`` on the CPU, of types `VIEWED`, as one vector (n,) for each.

    A variable whose memory a tensor reads gets memory of its own first, so that a write changes the variable only. The
    vectors are valid until a variable is assigned to. Nothing of them keeps the memory.
    """
    def own() -> list[tf.Tensor]:
        for v in variables:
            begin = [0] * v.shape.rank
            if begin:  # an assignment of no elements makes the memory the variable's own, after which each read copies
                tf.raw_ops.ResourceStridedSliceAssign(ref=v.handle, begin=begin, end=begin, strides=[1] * len(begin),
                                                      value=tf.zeros(begin, v.dtype))
                tf.raw_ops.DisableCopyOnRead(resource=v.handle)
            else:
                v.assign(tf.raw_ops.DeepCopy(x=v.read_value()))
        return [v.read_value() for v in variables]

    graph = tf.function(own, input_signature=[], **PLAIN)

    def memory() -> list[np.ndarray]:
        return [_writable(tensor) for tensor in graph()]

    return memory


def _writable(tensor: tf.Tensor) -> np.ndarray:
    """Return the memory of a tensor on the CPU as a vector (n,), which does not keep the memory."""
    numbers = np.asarray(memoryview(tensor))
    raw = (ctypes.c_byte * numbers.nbytes).from_address(numbers.ctypes.data)
    return np.ctypeslib.as_array(raw).view(numbers.dtype)


def _overwrite(variable: tf.Variable, values: np.ndarray) -> None:
    """Copy ``values`` into the memory of a variable; memory that somebody else reads is left to them."""
    if not values.ndim:
        variable.assign(tf.convert_to_tensor(values))
        return
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=[0] * values.ndim, end=list(values.shape), strides=[1] * values.ndim,
        value=ops.view(values))


def _as_keras(vector: tf.Variable) -> keras.Variable:
    made = keras.Variable(tf.zeros([0], vector.dtype), dtype=keras.backend.standardize_dtype(vector.dtype))
    made._value, made._shape = vector, tuple(vector.shape)
    return made


Block = tuple[tuple[int, int], ...]
"""(begin, end) along each dimension of a tensor."""


class Sliced(Optimizer):
    """Implements `hvdtrain.core.protocols.Optimizer` over row-major elements ``spans`` of the model's ``variables``.

    Keras gets a variable of its own for each of the model's, as long as the slice and of the same name, so that its
    state lines up with that of a whole optimizer. Such a variable is filled just before its update and emptied after
    it, one after another: the only lasting memory is the state of the slices. ``opt``: the run's optimizer over whole
    variables, which this one replaces. Its rate stays the one variable. Errors: `UserError` naming an optimizer, a
    setting or a variable that needs whole tensors.
    """

    def __init__(self, opt: Optimization, variables: Sequence[keras.Variable], scale: LossScale,
                 spans: Sequence[tuple[int, int]]) -> None:
        check_elementwise(opt.optimizer, variables)
        self.whole, self.spans = list(variables), list(spans)
        slices = [_slice_of(v, end - begin) for v, (begin, end) in zip(variables, spans)]
        _replace(opt, self.whole, slices, self.spans)
        super().__init__(opt, slices, scale)
        self.traced = None
        self._hosted = [i for i, v in enumerate(self.whole) if spans[i][0] < spans[i][1] and in_host(v)]
        self._memory = memory_of([self.whole[i].value for i in self._hosted])
        self._vectors_of: dict[int, np.ndarray] = {}

    def step(self, grads: Sequence[Any], buckets: Sequence[Bucket], clip_norm: float, look: bool,
             norm: float | None = None, unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update the slices from a gradient (end - begin,) for each; the caller has checked and clipped it."""
        assert not buckets and not clip_norm, "slices arrive one by one, without the norm of the whole tensor"
        tensors = [_tensor(x) for x in grads]
        unused = frozenset(unused)
        if unused not in self._functions:
            self._functions[unused] = tf.function(
                lambda *xs: self._apply(xs, unused), **PLAIN).get_concrete_function(*tensors)
        self._vectors_of = dict(zip(self._hosted, self._memory()))
        self._functions[unused](*tensors)
        self._vectors_of = {}
        return True, math.nan

    def describe(self) -> dict[str, str]:
        """Add that a compiled optimizer does not get the state."""
        words = self.opt.describe()
        if self.opt.compiled:
            words["optimizer"] += "; the compiled one itself holds no state of the run"
        return words

    def _apply(self, grads: Sequence[tf.Tensor], unused: frozenset[int]) -> tf.Tensor:
        own, done = self.own, [tf.no_op()]
        number = {v.value._unique_id: i for i, v in enumerate(self._variables)}
        with fused(own):
            plain, decay, subtract = own.update_step, own._apply_weight_decay, own.assign_sub

            def update_step(grad: tf.Tensor, variable: tf.Variable, rate: Any) -> None:
                i = number[variable._unique_id]
                begin, end = self.spans[i]
                if begin == end:
                    return
                with tf.control_dependencies(done):
                    flat_N = tf.reshape(self.whole[i].value.read_value(), [-1])
                    variable.assign(tf.slice(flat_N, [begin], [end - begin]), read_value=False)
                decay([self._variables[i]])
                plain(grad, variable, rate)
                written = self._written(i, tf.ensure_shape(variable.read_value(), [end - begin]))
                # The next one waits for both, else what was made for several would be there at once.
                done[:] = [*written, variable.assign(tf.zeros([0], variable.dtype), read_value=False)]

            def assign_sub(variable: Any, value: tf.Tensor) -> None:
                if getattr(variable, "_unique_id", None) in number:  # reads the model's memory: no update in place
                    variable.assign(variable.read_value() - tf.cast(value, variable.dtype), read_value=False)
                else:
                    subtract(variable, value)

            with instead(own, "update_step", update_step), instead(own, "_apply_weight_decay", lambda vs: None), \
                    instead(own, "assign_sub", assign_sub), \
                    instead(own, "_all_reduce_sum_gradients", lambda pairs: pairs):
                apply_gradients(own, [None if i in unused else x for i, x in enumerate(grads)], self._variables)
        return tf.constant(True)

    def _written(self, i: int, values_N: tf.Tensor) -> list[Any]:
        """Return the operations that replace the slice of variable ``i``."""
        begin, end = self.spans[i]
        if i not in self._hosted:
            return write(self.whole[i].value, begin, end, values_N)

        def store(values_N: np.ndarray) -> np.bool_:
            self._vectors_of[i][begin:end] = values_N
            return np.True_

        return [host_node(store, [values_N], tf.bool, f"update of {self.whole[i].path}", stateful=True)]


def in_host(variable: keras.Variable) -> bool:
    """Return whether numpy can read a variable's memory."""
    return "CPU" in variable.value.device and keras.backend.standardize_dtype(variable.dtype) in VIEWED


def blocks(shape: Sequence[int], begin: int, end: int) -> list[Block]:
    """Return the fewest blocks of a row-major tensor that make up its elements [begin, end), in their order. Pure.

    >>> blocks((4, 10), 5, 30)
    [((0, 1), (5, 10)), ((1, 3), (0, 10))]
    """
    if len(shape) <= 1:
        return [((begin, end),) if shape else ()]
    inner = math.prod(shape[1:])
    first, last = begin // inner, end // inner
    found: list[Block] = []
    if begin % inner:
        stop = min(end, (first + 1) * inner)
        found += [((first, first + 1), *b) for b in blocks(shape[1:], begin - first * inner, stop - first * inner)]
        begin, first = stop, first + 1
    if first < last and begin < end:
        found.append(((first, last), *((0, n) for n in shape[1:])))
        begin = last * inner
    if begin < end:
        found += [((last, last + 1), *b) for b in blocks(shape[1:], begin - last * inner, end - last * inner)]
    return found


def write(variable: tf.Variable, begin: int, end: int, values_N: tf.Tensor) -> list[Any]:
    """Replace the row-major elements [begin, end) of a variable, in place, by (end - begin,) values.

    Return the operations. A new variable takes less time and was measured to hold 7 bytes a parameter more.
    """
    shape = variable.shape.as_list()
    if end - begin == math.prod(shape):
        return [variable.assign(tf.reshape(values_N, shape), read_value=False)]
    at, written = 0, []
    for block in blocks(shape, begin, end):
        lengths = [stop - start for start, stop in block]
        part = tf.slice(values_N, [at], [math.prod(lengths)])
        written.append(tf.raw_ops.ResourceStridedSliceAssign(
            ref=variable.handle, begin=[start for start, _ in block], end=[stop for _, stop in block],
            strides=[1] * len(block), value=tf.reshape(part, lengths)))
        at += math.prod(lengths)
    return written


def _replace(opt: Optimization, wholes: Sequence[keras.Variable], slices: Sequence[keras.Variable],
             spans: Sequence[tuple[int, int]]) -> None:
    """Put an optimizer over ``slices`` in the place of that over ``wholes``, and take over its state."""
    own = opt.optimizer
    opt.exclude()
    made, owner = alike(own), {}
    numbers = {id(v): i for i, v in enumerate(slices)}
    add = made.add_variable_from_reference

    def add_variable_from_reference(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        owner[len(made.variables)] = numbers[id(reference_variable)]
        return add(reference_variable, *args, **kwargs)

    with instead(made, "add_variable_from_reference", add_variable_from_reference):
        made.build(list(slices))
    excluded = getattr(own, "_exclude_from_weight_decay", None)
    if excluded is not None:
        made.exclude_from_weight_decay(
            [part for part, whole in zip(slices, wholes) if own._var_key(whole) in excluded])
        made._exclude_from_weight_decay_pattern = own._exclude_from_weight_decay_pattern
    found = {place: Slice(i, *spans[i], tuple(wholes[i].shape)) for place, i in owner.items()}
    shown = alike(own)  # the rate and the count without state, so that a model which a callback saves can be loaded
    share(shown, "_iterations", made._iterations)
    opt.replace(made, found, shown)
    if opt.former is not None:
        take_over(opt, [state.view(v) for v in opt.former.variables])


def _slice_of(variable: keras.Variable, n: int) -> keras.Variable:
    """Return a Keras variable (n,) of the name of ``variable``, without contents."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    made = keras.Variable(tf.zeros([0], dtype), dtype=dtype)
    with tf.device(variable.value.device):
        made._value = tf.Variable(tf.zeros([0], dtype), shape=tf.TensorShape([None]),
                                  name=variable.value.name.rpartition(":")[0] or None)
    made._shape, made._name, made._path = (n,), variable.name, variable.path
    return made


def _tensor(x: Any) -> tf.Tensor:
    """Return a gradient as a tensor, which reads a numpy array in place if it can."""
    if not isinstance(x, np.ndarray):
        return x
    return ops.view(x) if x.flags.writeable else tf.convert_to_tensor(x)
