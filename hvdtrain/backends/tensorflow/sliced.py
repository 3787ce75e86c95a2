"""The run's Keras optimizer over a slice of each variable (`hvdtrain.parallel.data_parallel.zero`).

Owns how a slice is updated in the midst of its variable. Keras is shown a variable of its own for each of the model's,
as long as the slice and of the same name, so that the state which it makes lines up one to one with that of a whole
optimizer. Such a variable is filled just before its update and emptied after it, one after another: the only lasting
memory is the state of the slices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.facts import apply_gradients
from hvdtrain.backends.tensorflow import host, state
from hvdtrain.backends.tensorflow.buffers import take_over
from hvdtrain.backends.tensorflow.graphs import PLAIN
from hvdtrain.backends.tensorflow.optim import Optimization, Slice, alike, instead, share
from hvdtrain.backends.tensorflow.optimizer import Optimizer, check_elementwise, fused
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.parallel.precision.scaler import LossScale

Block = tuple[tuple[int, int], ...]
"""(begin, end) along each dimension of a tensor."""


class Sliced(Optimizer):
    """Implements `hvdtrain.core.protocols.Optimizer` over row-major elements ``spans`` of the model's ``variables``.

    ``opt``: the run's optimizer over whole variables, whose place that over the slices takes. Its rate stays the one
    variable, whoever changes it.
    Errors: `UserError` naming an optimizer, a setting or a variable that needs whole tensors.
    """

    def __init__(self, opt: Optimization, variables: Sequence[keras.Variable], scale: LossScale,
                 spans: Sequence[tuple[int, int]]) -> None:
        check_elementwise(opt.optimizer, variables)
        self.whole, self.spans = list(variables), list(spans)
        slices = [_slice_of(v, end - begin) for v, (begin, end) in zip(variables, spans)]
        _replace(opt, self.whole, slices, self.spans)
        super().__init__(opt, slices, scale)
        self.traced = None

    def step(self, grads: Sequence[Any], buckets: Sequence[Bucket], clip_norm: float, look: bool,
             norm: float | None = None, unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update the slices from a gradient (end - begin,) for each; what is finite and clipped is decided before."""
        assert not buckets and not clip_norm, "slices come singly, and their owner knows no norm of the whole"
        tensors = [_tensor(x) for x in grads]
        unused = frozenset(unused)
        if unused not in self._functions:
            self._functions[unused] = tf.function(
                lambda *xs: self._apply(xs, unused), **PLAIN).get_concrete_function(*tensors)
        self._functions[unused](*tensors)
        return True, math.nan

    def describe(self) -> dict[str, str]:
        """Return optimizer, rate and schedule in words, and that a compiled optimizer does not get the state."""
        words = self.opt.describe()
        if self.opt.compiled:
            words["optimizer"] += "; the compiled one itself holds no state of the run"
        return words

    def _apply(self, grads: Sequence[tf.Tensor], unused: frozenset[int]) -> tf.Tensor:
        own, done = self.own, [tf.no_op()]
        number = {v.value._unique_id: i for i, v in enumerate(self._variables)}
        with fused(own):
            plain, decay = own.update_step, own._apply_weight_decay

            def update_step(grad: tf.Tensor, variable: tf.Variable, rate: Any) -> None:
                i = number[variable._unique_id]
                begin, end = self.spans[i]
                if begin == end:
                    return
                target = self.whole[i].value
                with tf.control_dependencies(done):
                    flat_N = tf.reshape(target.read_value(), [-1])
                    variable.assign(tf.slice(flat_N, [begin], [end - begin]), read_value=False)
                decay([self._variables[i]])
                plain(grad, variable, rate)
                written = write(target, begin, end, tf.ensure_shape(variable.read_value(), [end - begin]))
                # The next one waits for both, else what was made for several would be there at once.
                done[:] = [*written, variable.assign(tf.zeros([0], variable.dtype), read_value=False)]

            with instead(own, "update_step", update_step), instead(own, "_apply_weight_decay", lambda vs: None), \
                    instead(own, "_all_reduce_sum_gradients", lambda pairs: pairs):
                apply_gradients(own, [None if i in unused else x for i, x in enumerate(grads)], self._variables)
        return tf.constant(True)


def blocks(shape: Sequence[int], begin: int, end: int) -> list[Block]:
    """Return the fewest blocks of a row-major tensor that its elements [begin, end) consist of, in their order. Pure.

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
    """Replace the row-major elements [begin, end) of a variable, where they lie, by (end - begin,) values.

    Returns the operations. To make the variable anew takes less time and was measured to hold 7 bytes a parameter more.
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
    """Put an optimizer over ``slices`` in the place of that over ``wholes``, and take over what that one holds."""
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
    """A Keras variable (n,) of the name of ``variable``, which holds nothing."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    made = keras.Variable(tf.zeros([0], dtype), dtype=dtype)
    with tf.device(variable.value.device):
        made._value = tf.Variable(tf.zeros([0], dtype), shape=tf.TensorShape([None]),
                                  name=variable.value.name.rpartition(":")[0] or None)
    made._shape, made._name, made._path = (n,), variable.name, variable.path
    return made


def _tensor(x: Any) -> tf.Tensor:
    """A gradient as a tensor, which reads a numpy array where it lies if it can."""
    if not isinstance(x, np.ndarray):
        return x
    return host.view(x) if x.flags.writeable else tf.convert_to_tensor(x)
