"""`GradientExchange`: gradients of all ranks become one, inside a graph or outside.

Owns the options of Horovod's tape and optimizer that concern the exchange, and which plan belongs to which variables.
A plan's buckets and nodes are `hvdtrain.tensorflow.plan`'s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.comm.compressors import create
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError, WaitTimeout
from hvdtrain.tensorflow import basics, objects
from hvdtrain.tensorflow.basics import Adasum, Average, Sum
from hvdtrain.tensorflow.compression import Compression, kind_of
from hvdtrain.tensorflow.errors import NotSupported, WrongValue
from hvdtrain.tensorflow.near import DTYPES as NEAR
from hvdtrain.tensorflow.nodes import label_of, refuse_xla, through_trace, unconverted
from hvdtrain.tensorflow.plan import DENSE, NONE, SPARSE, Item, Plan, Scale, check_alike
from hvdtrain.tensorflow.process_sets import ProcessSet, global_process_set
from hvdtrain.tensorflow.wiretypes import summable

LATE_S = 120.0
"""Longest wait of a rank whose gradients change, while it trains, for the other ranks' to change too."""
KEPT = 32
"""Plans an exchange keeps, one for each list of variables it was called with; the least recently used goes first."""


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
        self._kind = kind_of(compression)
        check_options(op, gradient_predivide_factor, groups, self._kind)
        self.op, self.process_set, self.name = op, process_set, name
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self._predivide, self._groups = float(gradient_predivide_factor), groups
        self._plans: OrderedDict[Any, tuple[Plan, list[Any]]] = OrderedDict()

    @property
    def size(self) -> int:
        """Number of ranks that take part; 1 on a rank that does not."""
        wire = basics.wire(self.process_set)
        return 1 if wire is None else int(wire.size)

    @unconverted
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The ranks' gradients as one, in the order given.

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
        found = self._plan(grads, variables, wire).run(grads)
        if not self._kind:
            found = [x if x is None or isinstance(x, tf.IndexedSlices) else self._compression.decompress(x, context)
                     for x, context in zip(found, contexts)]
        return found

    def _prepared(self, grad: Any, variable: Any) -> Any:
        """A gradient as it is exchanged."""
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

    def _plan(self, grads: list[Any], variables: list[Any], wire: Any) -> Plan:
        """The plan for these gradients; made, and compared between ranks, at the first call."""
        items = [_item(g, v) for g, v in zip(grads, variables)]
        key = (id(wire), *(item.same() for item in items), *map(identity_of, variables))
        if key not in self._plans:
            if self._plans:
                self._expect_others(items, variables)
            with tf.init_scope():
                rows_P = objects.gathered((self._describe(), items), self.process_set)
            check_alike(rows_P, self.process_set.ranks or [])
            self._plans[key] = self._made(grads, items, variables, wire), variables
            if len(self._plans) > KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key][0]

    def _expect_others(self, items: list[Item], variables: list[Any]) -> None:
        """Wait for the other ranks before a plan that is not the first: a rank that alone has other gradients than
        before would compare plans while the others exchange."""
        if self.process_set.process_set_id != 0:
            return
        own = [*map(identity_of, variables)]
        before = next((plan.items for plan, others in reversed(self._plans.values())
                       if [*map(identity_of, others)] == own), [])
        now, then = next(((a, b) for a, b in zip(items, before) if a.same() != b.same()), (None, None))
        what = "another list of variables than before" if now is None else f"{now} where it had {then} before"
        try:
            basics.world().control.barrier("of changed gradients", LATE_S)
        except WaitTimeout as error:
            raise through_trace(UserError(
                f"{error}: this rank has {what}, and the others have not",
                "gradients of the same variables on every rank in every step",
                "let all ranks take the same branches, or add 0 * the branch's output to the loss")) from None

    def _made(self, grads: list[Any], items: list[Item], variables: list[Any], wire: Any) -> Plan:
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
        scale = Scale() if not mean else Scale(divisor=size) if self._predivide == 1.0 else Scale(
            self._predivide, self._predivide / size)
        plain = not adasum and self._kind in ("", "none") and dtypes and NEAR >= set(dtypes.values())
        near = basics.near_wire(self.process_set) if plain else None
        return Plan(self.name, items, dtypes, wire, compressor, scale, self._members(items, variables), adasum, near)

    def _members(self, items: list[Item], variables: list[Any]) -> list[list[int]]:
        """The groups, as indices."""
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
    """What tells a variable from others: Keras' and the `tf.Variable` within are the same; 0 for a plain tensor."""
    inner = getattr(variable, "_value", None)
    if isinstance(inner, tf.Variable):
        return id(inner)
    return id(variable) if isinstance(variable, tf.Variable) else 0


def _item(grad: Any, variable: Any) -> Item:
    if grad is None:
        return Item(NONE, tuple(variable.shape), tf.as_dtype(variable.dtype).name, label_of(variable))
    if isinstance(grad, tf.IndexedSlices):
        return Item(SPARSE, tuple(grad.values.shape[1:]), grad.values.dtype.name, label_of(variable))
    return Item(DENSE, tuple(grad.shape), grad.dtype.name, label_of(variable))
