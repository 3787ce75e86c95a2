"""`GradientExchange`: gradients of all ranks become one, inside a graph or outside.

Owns the options of Horovod's tape and optimizer that concern the exchange, and the buckets and nodes of each list of
variables. Transports are `hvdtrain.tensorflow.basics`', compression `hvdtrain.comm.compressors`'.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain import job
from hvdtrain.backends.tensorflow.collectives import peer_failures
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.comm.compression import kind_of
from hvdtrain.comm.compressors import create
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import NotSupported, UserError, WaitTimeout, WrongValue, through_trace
from hvdtrain.core.process_sets import Adasum, Average, ProcessSet, Sum, global_process_set
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.tensorflow import basics, functions
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.nodes import (
    Mismatch,
    label_of,
    movable,
    node_name,
    refuse_xla,
    scratch,
    summable,
    unconverted,
    unfolded,
)
from hvdtrain.tensorflow.transports import DTYPES as SHARED
from hvdtrain.tensorflow.transports import SharedSum

LATE_S = 120.0
"""Longest wait of a rank whose gradients change, while it trains, for the other ranks' to change too."""
MOST_PLANS = 32
"""Plans of an exchange, one for each list of variables it was called with; the least recently used goes first."""
NONE, DENSE, SPARSE = "no gradient", "a gradient", "a sparse gradient"


class GradientExchange:
    """Gradients averaged (``op=Average``: sum, then divided), summed, or combined by Adasum over a set of ranks.

    ``compression``: one of `Compression`, or a class with compress and decompress. ``sparse_as_dense``: make
    `tf.IndexedSlices` dense first, instead of gathering their rows. ``gradient_predivide_factor`` f: divide by f
    before the sum and multiply by f / P after it. ``groups``: a number of groups, or lists of variables, that travel
    together. ``name`` of the nodes; exchanges of a program that are made in the same order may share it.
    Errors: `ValueError` and `UserError` for options that do not go together.
    """

    def __init__(self, *, op: int = Average, compression: Any = Compression.none, sparse_as_dense: bool = False,
                 gradient_predivide_factor: float = 1.0, groups: Any = None,
                 process_set: ProcessSet = global_process_set, name: str = "gradients") -> None:
        self._kind = kind_of(compression, Compression)
        check_options(op, gradient_predivide_factor, groups, self._kind)
        self.op, self.process_set, self.name = op, process_set, name
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self._predivide, self._groups = float(gradient_predivide_factor), groups
        self._plans: OrderedDict[Any, tuple[GradientPlan, list[Any]]] = OrderedDict()

    @property
    def size(self) -> int:
        """Number of ranks that take part; 1 on a rank that does not."""
        wire = basics.wire(self.process_set)
        return 1 if wire is None else int(wire.size)

    @unconverted
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the ranks' gradients as one, in the order given.

        ``grads``: tensors, `tf.IndexedSlices` or None, which stays None. ``variables``: what they belong to, the same
        on every rank, where the first call compares them. A world of one, and a rank outside of the process set, get
        their own back. Collective. Errors: `UserError` on every rank where variables or options differ, and under XLA.
        """
        grads, variables = list(grads), list(variables)
        if len(grads) != len(variables):
            raise ValueError(f"{len(grads)} gradients for {len(variables)} variables")
        wire = basics.wire(self.process_set)
        if wire is None or not grads:
            return grads
        refuse_xla("gradients exchanged")
        grads = [self._prepared(g, v) for g, v in zip(grads, variables)]
        contexts: list[Any] = [None] * len(grads)
        if not self._kind:
            for i, grad in enumerate(grads):
                if tf.is_tensor(grad) and not isinstance(grad, tf.IndexedSlices):
                    grads[i], contexts[i] = self._compression.compress(grad)
        sums = self._plan(grads, variables, wire).run(grads)
        if not self._kind:
            sums = [x if x is None or isinstance(x, tf.IndexedSlices) else self._compression.decompress(x, context)
                    for x, context in zip(sums, contexts)]
        return sums

    def _prepared(self, grad: Any, variable: Any) -> Any:
        """Return a gradient in the form in which it is exchanged."""
        if isinstance(grad, tf.IndexedSlices):
            if self._sparse_as_dense:
                shape = [int(n) for n in variable.shape]
                rows = tf.math.unsorted_segment_sum(grad.values, grad.indices, shape[0])
                return tf.ensure_shape(rows, shape)
            if self.op == Adasum:
                raise through_trace(NotSupported(f"a sparse gradient of {label_of(variable)} with op=Adasum",
                                                 "dense gradients", "pass sparse_as_dense=True"))
            return grad
        if grad is None:
            return None
        grad = tf.convert_to_tensor(grad)
        return tf.ensure_shape(grad, variable.shape) if not grad.shape.is_fully_defined() else grad

    def _plan(self, grads: list[Any], variables: list[Any], wire: Any) -> GradientPlan:
        """Return the plan for these gradients; made, and compared between ranks, at the first call."""
        items = [_item(g, v) for g, v in zip(grads, variables)]
        key = (id(wire), *(item.same() for item in items), *map(identity_of, variables))
        if key not in self._plans:
            if self._plans:
                self._expect_others(items, variables)
            with tf.init_scope():
                rows_P = functions.gathered((self._describe(), items), self.process_set)
            check_same_plan(rows_P, self.process_set.ranks or [])
            self._plans[key] = self._made(grads, items, variables, wire), variables
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key][0]

    def _expect_others(self, items: list[GradientItem], variables: list[Any]) -> None:
        """Wait for the other ranks before a plan that is not the first: a rank that alone has other gradients than
        before would compare plans while the others exchange."""
        if self.process_set.process_set_id != 0:
            return
        own = [*map(identity_of, variables)]
        before = next((plan.items for plan, others in reversed(self._plans.values())
                       if [*map(identity_of, others)] == own), [])
        now, then = next(((a, b) for a, b in zip(items, before) if a.same() != b.same()), (None, None))
        what = "a list of variables that differs from before" if now is None else f"{now} where it had {then} before"
        try:
            job.world().control.barrier("of changed gradients", LATE_S)
        except WaitTimeout as error:
            raise through_trace(UserError(
                f"{error}: this rank has {what}, and the others do not",
                "gradients of the same variables on every rank in every step",
                "make all ranks take the same branches, or add 0 * the branch's output to the loss")) from None

    def _made(self, grads: list[Any], items: list[GradientItem], variables: list[Any], wire: Any) -> GradientPlan:
        adasum, size = self.op == Adasum, wire.size
        if adasum and ("adasum" not in wire.reductions or size & (size - 1)):
            raise through_trace(NotSupported(f"op=Adasum on {size} ranks over {wire.name}",
                                             "1, 2, 4, 8, ... ranks, all of the job, over a Horovod that was built "
                                             "with MPI", "use op=hvd.Average"))
        compressor = (create("adasum", Config()) if adasum else
                      self._compression.made() if self._kind else create("none", Config()))
        narrow = compressor.dtypes is not None and "float64" not in compressor.dtypes
        dtypes = {}
        for i, (grad, item) in enumerate(zip(grads, items)):
            if item.kind == DENSE:
                dtype = summable(grad)[0].dtype.name
                dtypes[i] = "float32" if narrow and dtype == "float64" else dtype
        mean = self.op == Average
        factors = SumFactors() if not mean else SumFactors(divisor=size) if self._predivide == 1.0 else SumFactors(
            self._predivide, self._predivide / size)
        plain = not adasum and self._kind in ("", "none") and dtypes and SHARED >= set(dtypes.values())
        shared = basics.shared_wire(self.process_set) if plain else None
        return GradientPlan(self.name, items, dtypes, wire, compressor, factors, self._members(items, variables),
                            adasum, shared)

    def _members(self, items: list[GradientItem], variables: list[Any]) -> list[list[int]]:
        dense = [i for i, item in enumerate(items) if item.kind == DENSE]
        if not self._groups:
            return []
        if isinstance(self._groups, int):
            count = min(self._groups, max(1, len(dense)))
            ends = [len(dense) * (n + 1) // count for n in range(count)]
            return [dense[a:b] for a, b in zip([0, *ends], ends)]
        places = {identity_of(v): i for i, v in enumerate(variables)}
        return [[places[identity_of(v)] for v in group if identity_of(v) in places] for group in self._groups]

    def _describe(self) -> str:
        op = {Average: "Average", Sum: "Sum", Adasum: "Adasum"}[self.op]
        how = self._compression.made().describe() if self._kind else getattr(self._compression, "__name__", "its own")
        groups = self._groups if isinstance(self._groups, int) else [len(g) for g in self._groups or []]
        return (f"op={op}, compression={how}, sparse_as_dense={self._sparse_as_dense}, "
                f"gradient_predivide_factor={self._predivide:g}, groups={groups}, name={self.name!r}")


def check_options(op: int, predivide: float, groups: Any, kind: str) -> None:
    """Refuse what does not go together, before the first gradient. Pure."""
    if op not in (Average, Sum, Adasum):
        raise WrongValue(f"op={op} for gradients", "hvd.Average, hvd.Sum or hvd.Adasum", "pass one of them")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor goes with op=Average only")
    if groups is not None and not isinstance(groups, (list, tuple)) and not (isinstance(groups, int) and groups > 0):
        raise ValueError(f"groups is {groups!r}; expected a positive number, or a list of lists of variables")
    if op == Adasum and kind not in ("", "none"):
        raise UserError(f"op=Adasum with compression {kind}", "one of the two", "pass compression=hvd.Compression.none")


def identity_of(variable: Any) -> int:
    """Return a variable's identity, the same of Keras' and of the `tf.Variable` within; 0 for a plain tensor."""
    inner = getattr(variable, "_value", None)
    if isinstance(inner, tf.Variable):
        return id(inner)
    return id(variable) if isinstance(variable, tf.Variable) else 0


@dataclasses.dataclass(frozen=True)
class GradientItem:
    """The kind, shape and type of one gradient, which the ranks compare; ``label`` is for messages."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    label: str

    def same(self) -> tuple[Any, ...]:
        """Return what must be equal on all ranks; names may differ, Keras numbers layers by process."""
        return self.kind, self.shape, self.dtype

    def __str__(self) -> str:
        return f"{self.kind} of {self.label} ({self.dtype} {list(self.shape)})"


def _item(grad: Any, variable: Any) -> GradientItem:
    if grad is None:
        return GradientItem(NONE, tuple(variable.shape), tf.as_dtype(variable.dtype).name, label_of(variable))
    if isinstance(grad, tf.IndexedSlices):
        return GradientItem(SPARSE, tuple(grad.values.shape[1:]), grad.values.dtype.name, label_of(variable))
    return GradientItem(DENSE, tuple(grad.shape), grad.dtype.name, label_of(variable))


@dataclasses.dataclass(frozen=True)
class SumFactors:
    """Factors around the sum, the same on every rank: divide before, then multiply or, exactly, divide after."""

    before: float = 1.0
    factor: float = 1.0
    divisor: int = 1

    def enter(self, x: tf.Tensor) -> tf.Tensor:
        """Return what is summed."""
        return x if self.before == 1.0 else x / tf.constant(self.before, x.dtype)

    def leave(self, x: tf.Tensor) -> tf.Tensor:
        """Return the result of a sum."""
        if self.factor != 1.0:
            x = x * tf.constant(self.factor, x.dtype)
        return x if self.divisor == 1 else x / tf.cast(self.divisor, x.dtype)


class GradientPlan:
    """The exchange of one list of gradients over one transport. `run` works while a graph is traced and outside.

    ``items``: of all gradients, in order. ``wire_dtypes``: type each dense one travels as. ``groups``: lists of
    indices that travel together, the rest in buckets of the usual size; ``apart``: every tensor by itself. ``shared``:
    the transport over shared memory that the dense gradients take instead, where there is one.
    """

    def __init__(self, name: str, items: Sequence[GradientItem], wire_dtypes: dict[int, str], wire: Any,
                 compressor: Any, factors: SumFactors, groups: Sequence[Sequence[int]] = (), apart: bool = False,
                 shared: Any = None) -> None:
        self.name, self.items, self._wire, self._factors = name, list(items), wire, factors
        self._dense = [i for i, item in enumerate(items) if item.kind == DENSE]
        self._sparse = [i for i, item in enumerate(items) if item.kind == SPARSE]
        specs = {i: ParamSpec(items[i].label, items[i].shape, wire_dtypes[i]) for i in self._dense}
        self._dtypes = [wire_dtypes[i] for i in self._dense]
        self._buckets = fused(specs, groups, 0.0 if apart else ExchangeConfig().unmeasured_mb)
        with tf.init_scope():
            self._reducer = Reducer(self._buckets, compressor, wire, Ops())
        self._function: Callable[..., Any] | None = None
        self._shared = shared and SharedSum(shared, name, [specs[i].shape for i in self._dense], self._dtypes,
                                            factors.divisor > 1, self._back)

    def run(self, grads: Sequence[Any]) -> list[Any]:
        """Return gradients, as `items` has them, over the ranks; the same bits everywhere."""
        parts = [grads[i] for i in self._dense]
        for i in self._sparse:
            parts += [grads[i].values, grads[i].indices]
        if tf.inside_function():
            results = self._graph(parts)
        else:
            with peer_failures():
                results = self._traced(parts)(*parts)
        out: list[Any] = [None] * len(grads)
        for i, x in zip(self._dense, results):
            out[i] = x
        rest = results[len(self._dense):]
        for i, values, indices in zip(self._sparse, rest[::2], rest[1::2]):
            out[i] = tf.IndexedSlices(values, indices, grads[i].dense_shape)
        return out

    def _traced(self, parts: Sequence[tf.Tensor]) -> Callable[..., Any]:
        if self._function is None:
            specs = [tf.TensorSpec(x.shape if n < len(self._dense) else [None, *x.shape[1:]], x.dtype)
                     for n, x in enumerate(parts)]
            function = tf.function(lambda *xs: self._graph(list(xs)), input_signature=specs, jit_compile=False,
                                   autograph=False)
            self._function = function.get_concrete_function()
        return self._function

    def _graph(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Add the nodes of one exchange, which begins when the one before it in this program has ended.

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
        if not self._shared:
            return self._over_wire(grads, prefix, self._factors)
        factors = dataclasses.replace(self._factors, divisor=1)  # the node divides
        own = [factors.enter(tf.cast(x, dtype)) for x, dtype in zip(grads, self._dtypes)]
        return [tf.cast(factors.leave(x), grad.dtype) for x, grad in zip(self._shared(own), grads)]

    def _back(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return gradients of what the node in shared memory gave, through the same sum or mean."""
        return self._over_wire(grads, node_name(f"{self.name}_back"), SumFactors(divisor=self._factors.divisor))

    def _over_wire(self, grads: list[tf.Tensor], prefix: str, factors: SumFactors) -> list[tf.Tensor]:
        """Return dense gradients over the ranks, by a collective for each bucket and round of the compressor."""
        place = {i: n for n, i in enumerate(self._dense)}
        flats = []
        for bucket in self._buckets:
            own = [tf.cast(grads[place[i]], bucket.dtype) for i in bucket.params]
            flats.append(unfolded(factors.enter(self._reducer.ops.pack(own))))
        out = list(grads)
        for i, flat_N in enumerate(flats):
            self._reducer.start(i, flat_N, prefix)
        # Nobody says here that a step is left out, so a bucket's state moves on only where its sum is finite.
        sums = self._reducer.finish(finite_only=True)
        for bucket, sum_N in zip(self._buckets, sums):
            for i, x in zip(bucket.params, self._reducer.ops.unpack(factors.leave(sum_N), bucket.shapes)):
                out[place[i]] = tf.cast(x, grads[place[i]].dtype)
        return out

    def _rows(self, parts: list[tf.Tensor], prefix: str) -> list[tf.Tensor]:
        """Return rows of sparse gradients from all ranks, one behind the other: values and indices alternate."""
        out = []
        for n, x in enumerate(parts):
            if n % 2:
                out.append(self._wire.gather_rows(unfolded(x), f"{prefix}.s{n // 2}.indices").wait())
                continue
            moved, back = movable(x)
            rows = back(self._wire.gather_rows(unfolded(moved), f"{prefix}.s{n // 2}.values").wait())
            total, narrow = summable(rows)
            mean = SumFactors(divisor=self._factors.divisor, factor=self._factors.factor / self._factors.before)
            out.append(narrow(mean.leave(total)))
        return out


def fused(specs: dict[int, ParamSpec], groups: Sequence[Sequence[int]], bucket_mb: float) -> list[Bucket]:
    """Return buckets of ``specs``: one of each type for every group, then of ``bucket_mb`` MiB for the rest. Pure."""
    grouped = {i for group in groups for i in group}
    plans = [([i for i in group if i in specs], math.inf) for group in groups]
    plans.append(([i for i in specs if i not in grouped], bucket_mb))
    found: list[Bucket] = []
    for own, limit_mb in plans:
        for bucket in plan_buckets([specs[i] for i in own], limit_mb):
            found.append(dataclasses.replace(bucket, index=len(found), params=tuple(own[n] for n in bucket.params)))
    return found


def check_same_plan(rows_P: Sequence[tuple[str, Sequence[GradientItem]]], ranks: Sequence[int]) -> None:
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
