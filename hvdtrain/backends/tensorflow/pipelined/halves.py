"""Forward and backward of a chunk as two graphs, with the tensors that backward needs passed between them.

Owns the partition of a traced graph. Recomputed blocks are `hvdtrain.backends.tensorflow.recompute`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import func_graph_from_py_func
from tensorflow.python.ops.handle_data_util import copy_handle_data

from hvdtrain.backends.tensorflow import recompute
from hvdtrain.backends.tensorflow.graphs import Graph
from hvdtrain.backends.tensorflow.pipelined.crossing import has_gradient

Trace = Callable[..., list[tf.Tensor]]

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
"""Operations that leave the variable which they get as it is."""


class Halves:
    """Graphs of ``forward(*leaves)`` for tensors like ``specs`` and of its backward.

    Both are traced as one, so that backward is the same as in a whole model, recomputed blocks included. Then the
    operations of forward are copied into a graph of their own and the others into a second one. Constants and trainable
    variables that backward reads are read again; the rest are results of the first graph and arguments of the second.
    ``inputs``: the numbers of the leaves whose gradient is wanted, besides ``variables``. ``add(grads)``: takes the
    variables' gradients while backward is traced. ``recomputed``: blocks that backward computes again.
    """

    def __init__(self, forward: Trace, specs: Sequence[tf.TensorSpec], inputs: Sequence[int],
                 variables: Sequence[tf.Variable], add: Callable[[Sequence[Any]], None],
                 recomputed: Collection[str] = ()) -> None:
        both = _Both(forward, specs, inputs, variables, recomputed)
        ops = both.graph.get_operations()
        first = _before(ops[:both.n_forward])
        rest = [op for op in ops if op.name not in first and op.type != "Placeholder"]
        lasting = _lasting(ops[:both.n_forward], both.graph, variables)
        again = {op.name: op for op in ops if op.name in first and _read_anew(op, lasting)}
        self._n = len(both.outputs)
        kept = list({t.name: t for op in rest for t in op.inputs if t.op.name not in again
                     and (t.op.name in first or any(t is x for x in both.leaves))}.values())
        rest = [*(op for op in ops if op.name in again and any(
            c.name not in first for t in op.outputs for c in t.consumers())), *rest]
        captures = {inner.name: outer for outer, inner in both.graph.captures}

        backs, grads = both.grads[:len(inputs)], both.grads[len(inputs):]
        wanted = [both.leaves[i] for i in inputs]
        kept += [x for x, g in zip(wanted, backs) if g is None and not any(x is y for y in kept)]

        def trace_forward(*leaves: tf.Tensor) -> list[tf.Tensor]:
            made = _Copy(both.graph, captures, dict(zip((x.name for x in both.leaves), leaves)))
            made.all(op for op in ops if op.name in first)
            return [made.of(x) for x in (*both.outputs, *kept)]

        def trace_backward(*given: tf.Tensor) -> list[tf.Tensor]:
            known = [*kept, *both.given]
            made = _Copy(both.graph, captures, dict(zip((x.name for x in known), given)))
            made.all(rest)
            add([made.sparse(g) for g in grads])
            return [tf.zeros_like(made.of(x)) if g is None else tf.convert_to_tensor(made.sparse(g))
                    for x, g in zip(wanted, backs)]

        origins = _origins(ops, both.given)
        self._all = 2 ** len(both.given) - 1
        self._origins = [None if g is None else _origin(g, origins) for g in both.grads]
        self.forward = Graph(trace_forward, specs)
        self._backward: Graph | None = None
        self._trace = trace_backward, [tf.TensorSpec(x.shape, x.dtype) for x in (*kept, *both.given)]

    def split(self, results: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return (outputs, tensors kept for backward) of the results of `forward`."""
        return list(results[:self._n]), list(results[self._n:])

    def exist(self, absent: Collection[int]) -> list[bool]:
        """Return whether there is a gradient, of each input and then of each variable.

        ``absent``: the numbers of the outputs with a gradient, among these, on which the loss does not depend. Backward
        takes zeros for them, which would make a gradient where the whole model has none.
        """
        left = self._all - sum(2 ** i for i in absent)
        return [origin is not None and bool(origin & left) for origin in self._origins]

    @property
    def backward(self) -> Graph:
        """The graph of backward: takes the kept tensors, then the gradients of outputs; gives those of inputs."""
        if self._backward is None:
            self._backward = Graph(*self._trace)
        return self._backward


class _Both:
    """A graph of forward and backward, which is never run."""

    def __init__(self, forward: Trace, specs: Sequence[tf.TensorSpec], inputs: Sequence[int],
                 variables: Sequence[tf.Variable], recomputed: Collection[str]) -> None:
        def trace(*leaves: tf.Tensor) -> list[tf.Tensor]:
            wanted = [leaves[i] for i in inputs]
            with recompute.recording() as found:
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch([*wanted, *variables])
                    self.outputs = list(forward(*leaves))
                recompute.backward_begins()
                floats = [x for x in self.outputs if has_gradient(x)]
                self.given = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in floats]
                self.grads = tape.gradient(floats, [*wanted, *variables], output_gradients=self.given) \
                    if floats else [None] * (len(wanted) + len(variables))
            recompute.rewrite(found, recomputed)
            self.n_forward, self.leaves = found.n_forward, leaves
            return []

        self.graph = func_graph_from_py_func("both", trace, tuple(specs), {}, add_control_dependencies=False)


class _Copy:
    """Copies operations of ``source`` into the graph that is being traced. ``known``: replacements of its tensors."""

    def __init__(self, source: Any, captures: dict[str, Any], known: dict[str, tf.Tensor]) -> None:
        self._target: Any = tf.compat.v1.get_default_graph()
        self._captures, self._made, self._ops = captures, dict(known), dict[str, Any]()
        for function in source._functions.values():
            self._target._add_function_recursive(function)

    def all(self, ops: Iterable[Any]) -> None:
        """Copy operations, each behind those that it needs of them."""
        left = {op.name: op for op in ops if op.type != "Placeholder"}
        for name in list(left):
            todo = [left[name]] if name in left else []
            while todo:
                op = todo[-1]
                before = [b for b in (*(t.op for t in op.inputs if t.name not in self._made), *op.control_inputs)
                          if b.name in left and b.name not in self._ops]
                if before:
                    todo += before
                    continue
                todo.pop()
                if op.name not in self._ops:
                    self._copy(op)
                left.pop(op.name, None)

    def _copy(self, op: Any) -> None:
        controls = [self._ops[c.name] for c in op.control_inputs if c.name in self._ops]
        with tf.control_dependencies(None), tf.control_dependencies(controls):
            copy = self._target._create_op_internal(
                op.type, [self.of(t) for t in op.inputs], [t.dtype for t in op.outputs], name=op.name,
                attrs={key: value for key, value in op.node_def.attr.items() if key != "_class"}, op_def=op.op_def,
                compute_device=False)
        copy._set_device(op.device)
        self._ops[op.name] = copy
        for old, new in zip(op.outputs, copy.outputs):
            new.set_shape(old.shape)
            copy_handle_data(old, new)
            self._made.setdefault(old.name, new)

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the replacement of a tensor of the source."""
        if tensor.name not in self._made:
            self._made[tensor.name] = self._target.capture(self._captures[tensor.name])
        return self._made[tensor.name]

    def sparse(self, grad: Any) -> Any:
        """Return `of`, also of a gradient that is sparse, or None."""
        if isinstance(grad, tf.IndexedSlices):
            parts = (grad.values, grad.indices, grad.dense_shape)
            return tf.IndexedSlices(*(None if part is None else self.of(part) for part in parts))
        return None if grad is None else self.of(grad)


def _origins(ops: Iterable[Any], given: Sequence[tf.Tensor]) -> dict[str, int]:
    """Return the name of each operation with the ``given`` tensors that it is computed from, as bits."""
    found = {x.op.name: 2 ** i for i, x in enumerate(given)}
    for op in ops:  # in the order in which they were made
        found.setdefault(op.name, functools.reduce(int.__or__, (found.get(t.op.name, 0) for t in op.inputs), 0))
    return found


def _origin(grad: Any, origins: dict[str, int]) -> int:
    """Return the bits of a gradient, which may be sparse; all if it is made of none, such as a constant."""
    tensors = [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]
    return functools.reduce(int.__or__, (origins[t.op.name] for t in tensors)) or -1


def _before(ops: Iterable[Any]) -> set[str]:
    found: set[str] = set()
    todo = list(ops)
    while todo:
        op = todo.pop()
        if op.name not in found and op.type != "Placeholder":
            found.add(op.name)
            todo += [*(t.op for t in op.inputs), *op.control_inputs]
    return found


def _lasting(forward: Iterable[Any], graph: Any, variables: Sequence[tf.Variable]) -> list[Any]:
    """Return the handles, in the graph, of those of ``variables`` that ``forward`` only reads.

    A layer may write to its weights while it trains, as `keras.layers.SpectralNormalization` does. Functions that get a
    variable count as writing: it costs nothing to keep what was read.
    """
    written = {id(t) for op in forward if op.type not in _READS for t in op.inputs if t.dtype == tf.resource}
    handles = {id(v.handle) for v in variables}
    return [inner for outer, inner in graph.captures if id(outer) in handles and id(inner) not in written]


def _read_anew(op: Any, lasting: Sequence[Any]) -> bool:
    """Return whether backward can read ``op``'s result again: a constant, or a variable that only updates change."""
    return op.type == "Const" or op.type == "ReadVariableOp" and any(op.inputs[0] is handle for handle in lasting)
