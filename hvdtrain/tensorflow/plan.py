"""What one exchange of gradients does: which tensor travels in which bucket, and the graph that moves them.

Owns the buckets and the check that all ranks hold the same plan. Which
exchanges there are, and with which options, is `hvdtrain.tensorflow.gradients`'.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.tensorflow.collectives import peer_failures
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.config import Exchange
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.tensorflow.errors import Mismatch
from hvdtrain.tensorflow.near import NearSum, failures
from hvdtrain.tensorflow.nodes import node_name, scratch, through_trace, unfolded
from hvdtrain.tensorflow.wiretypes import movable, summable

NONE, DENSE, SPARSE = "no gradient", "a gradient", "a sparse gradient"


@dataclasses.dataclass(frozen=True)
class Item:
    """One gradient as the ranks compare it: what kind it is, of which shape and type; ``label`` is for messages."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    label: str

    def same(self) -> tuple[Any, ...]:
        """What must be equal on all ranks; names may differ, Keras numbers layers by process."""
        return self.kind, self.shape, self.dtype

    def __str__(self) -> str:
        return f"{self.kind} of {self.label} ({self.dtype} {list(self.shape)})"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Factors around the sum, the same on every rank: divide before, then multiply or, exactly, divide after."""

    before: float = 1.0
    factor: float = 1.0
    divisor: int = 1

    def enter(self, x: tf.Tensor) -> tf.Tensor:
        """Before the sum."""
        return x if self.before == 1.0 else x / tf.constant(self.before, x.dtype)

    def leave(self, x: tf.Tensor) -> tf.Tensor:
        """After the sum."""
        if self.factor != 1.0:
            x = x * tf.constant(self.factor, x.dtype)
        return x if self.divisor == 1 else x / tf.cast(self.divisor, x.dtype)


class Plan:
    """The exchange of one list of gradients over one wire. `run` works while a graph is traced and outside.

    ``items``: of all gradients, in order. ``wire_dtypes``: type each dense one travels as. ``groups``: lists of
    indices that travel together, the rest in buckets of the usual size; ``apart``: every tensor by itself. ``near``:
    the wire over shared memory that the dense gradients take instead, where there is one.
    """

    def __init__(self, name: str, items: Sequence[Item], wire_dtypes: dict[int, str], wire: Any, compressor: Any,
                 scale: Scale, groups: Sequence[Sequence[int]] = (), apart: bool = False, near: Any = None) -> None:
        self.name, self.items, self._wire, self._scale = name, list(items), wire, scale
        self._dense = [i for i, item in enumerate(items) if item.kind == DENSE]
        self._sparse = [i for i, item in enumerate(items) if item.kind == SPARSE]
        specs = {i: ParamSpec(items[i].label, items[i].shape, wire_dtypes[i]) for i in self._dense}
        self._dtypes = [wire_dtypes[i] for i in self._dense]
        self._buckets = fused(specs, groups, 0.0 if apart else float(_bucket_mb()))
        with tf.init_scope():
            self._reducer = Reducer(self._buckets, compressor, wire, Ops())
        self._function: Callable[..., Any] | None = None
        self._near = near and NearSum(near, name, [specs[i].shape for i in self._dense], self._dtypes,
                                      scale.divisor > 1, self._back)

    def run(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients, as `items` has them, over the ranks; the same bits everywhere."""
        parts = [grads[i] for i in self._dense]
        for i in self._sparse:
            parts += [grads[i].values, grads[i].indices]
        if tf.inside_function():
            results = self._graph(parts)
        else:
            with peer_failures(), failures():
                results = self._traced(parts)(*parts)
        out: list[Any] = [None] * len(grads)
        for i, x in zip(self._dense, results):
            out[i] = x
        rest = results[len(self._dense):]
        for i, values, indices in zip(self._sparse, rest[::2], rest[1::2]):
            out[i] = tf.IndexedSlices(values, indices, grads[i].dense_shape)
        return out

    def _traced(self, parts: Sequence[tf.Tensor]) -> Callable[..., Any]:
        """The graph of an exchange outside of graphs."""
        if self._function is None:
            specs = [tf.TensorSpec(x.shape if n < len(self._dense) else [None, *x.shape[1:]], x.dtype)
                     for n, x in enumerate(parts)]
            function = tf.function(lambda *xs: self._graph(list(xs)), input_signature=specs, jit_compile=False,
                                   autograph=False)
            self._function = function.get_concrete_function()
        return self._function

    def _graph(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        """The nodes of one exchange, which begins when the one before it in this program has ended.

        TensorFlow keeps a program's order for what reads and writes a variable, so all exchanges share one.
        """
        prefix, turn = node_name(self.name), scratch("turn", tf.int64)
        with tf.control_dependencies([turn.read_value()]):
            dense = self._sums(parts[:len(self._dense)], prefix)
            sparse = self._rows(parts[len(self._dense):], prefix)
        with tf.control_dependencies([*dense, *sparse]):
            turn.assign_add(1)
        return dense + sparse

    def _sums(self, grads: list[tf.Tensor], prefix: str) -> list[tf.Tensor]:
        """Dense gradients over the ranks."""
        if not self._near:
            return self._over_wire(grads, prefix, self._scale)
        factors = dataclasses.replace(self._scale, divisor=1)  # the mean is the node's
        own = [factors.enter(tf.cast(x, dtype)) for x, dtype in zip(grads, self._dtypes)]
        return [tf.cast(factors.leave(x), grad.dtype) for x, grad in zip(self._near(own), grads)]

    def _back(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        """Gradients of what the node in shared memory gave, through the same sum or mean."""
        return self._over_wire(grads, node_name(f"{self.name}_back"), Scale(divisor=self._scale.divisor))

    def _over_wire(self, grads: list[tf.Tensor], prefix: str, scale: Scale) -> list[tf.Tensor]:
        """Dense gradients over the ranks, a collective for each bucket and round of the compressor."""
        place = {i: n for n, i in enumerate(self._dense)}
        flats = []
        for bucket in self._buckets:
            own = [tf.cast(grads[place[i]], bucket.dtype) for i in bucket.params]
            flats.append(unfolded(scale.enter(self._reducer.ops.pack(own))))
        out = list(grads)
        for i, flat_N in enumerate(flats):
            self._reducer.start(i, flat_N, prefix)
        # Nobody says here that a step is left out, so a bucket's state moves on only where its sum is finite.
        sums = self._reducer.finish(finite_only=True)
        for bucket, sum_N in zip(self._buckets, sums):
            for i, x in zip(bucket.params, self._reducer.ops.unpack(scale.leave(sum_N), bucket.shapes)):
                out[place[i]] = tf.cast(x, grads[place[i]].dtype)
        return out

    def _rows(self, parts: list[tf.Tensor], prefix: str) -> list[tf.Tensor]:
        """Rows of sparse gradients from all ranks, one behind the other: (values, indices) in turn."""
        out = []
        for n, x in enumerate(parts):
            if n % 2:
                out.append(self._wire.gather_rows(unfolded(x), f"{prefix}.s{n // 2}.indices").wait())
                continue
            moved, back = movable(x)
            rows = back(self._wire.gather_rows(unfolded(moved), f"{prefix}.s{n // 2}.values").wait())
            total, narrow = summable(rows)
            mean = Scale(divisor=self._scale.divisor, factor=self._scale.factor / self._scale.before)
            out.append(narrow(mean.leave(total)))
        return out


def fused(specs: dict[int, ParamSpec], groups: Sequence[Sequence[int]], bucket_mb: float) -> list[Bucket]:
    """Buckets of ``specs``: one of each type for every group, then those of ``bucket_mb`` MiB for the rest. Pure."""
    grouped = {i for group in groups for i in group}
    plans = [([i for i in group if i in specs], math.inf) for group in groups]
    plans.append(([i for i in specs if i not in grouped], bucket_mb))
    found: list[Bucket] = []
    for own, limit_mb in plans:
        for bucket in plan_buckets([specs[i] for i in own], limit_mb):
            found.append(dataclasses.replace(bucket, index=len(found), params=tuple(own[n] for n in bucket.params)))
    return found


def check_alike(rows_P: Sequence[tuple[str, Sequence[Item]]], ranks: Sequence[int]) -> None:
    """Raise `UserError` that names the first difference between ranks' (options, items). Pure."""
    options, items = rows_P[0]
    for rank, (theirs, others) in zip(ranks[1:], rows_P[1:]):
        found = None
        if theirs != options:
            found = f"rank {rank} exchanges gradients with {theirs}, rank {ranks[0]} with {options}"
        elif [x.same() for x in items] != [x.same() for x in others]:
            n = next((n for n, (a, b) in enumerate(zip(items, others)) if a.same() != b.same()),
                     min(len(items), len(others)))
            here, there = (str(x[n]) if n < len(x) else "nothing" for x in (items, others))
            found = f"at place {n} of the gradients rank {rank} has {there}, rank {ranks[0]} has {here}"
        if found is not None:
            raise through_trace(Mismatch(found, "the same variables in the same order on every rank",
                                         "build the same model on every rank, or use local variables "
                                         "(register_local_source, local_layers) for what differs"))


def _bucket_mb() -> float:
    size_mb = Exchange().bucket_mb
    return 16.0 if isinstance(size_mb, str) else size_mb
