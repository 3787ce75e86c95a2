"""Activation checkpointing in a graph that is being traced: backward recomputes what blocks made in forward.

Owns the copies of operations and their start. Which blocks are recomputed is `transforms.remat`'s.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

VIEWS = ("Identity", "Reshape", "Squeeze", "ExpandDims")
"""Operations whose result lies in the memory of their first input."""

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
_FUNCTIONS = ("PartitionedCall", "StatefulPartitionedCall")
_KEPT = ("Placeholder", "Const", "PyFuncStateless")

_instead: list[Callable[[str, Callable[[], Any]], Any]] = []
_open: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()


class Call(NamedTuple):
    """A call of a block: the operations ``begin`` to ``end`` of its graph, as numbers."""

    name: str
    begin: int
    end: int


@dataclass
class Recording:
    """Operations of a graph by block. ``inner``: blocks in a loop or function of it; ``within``: in a block."""

    graph: Any
    calls: list[Call] = field(default_factory=list)
    inner: set[str] = field(default_factory=set)
    within: set[str] = field(default_factory=set)
    n_forward: int = -1
    depth: int = 0

    def fused(self) -> set[str]:
        """Return the blocks that call a function of TensorFlow's: it is inlined after the graph is made, and its
        operations fused with what reads them.
        """
        ops = self.graph.get_operations()
        return {call.name for call in self.calls if any(op.type in _FUNCTIONS for op in ops[call.begin:call.end])}


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Note the calls of blocks in the graph that is being traced."""
    found = Recording(tf.compat.v1.get_default_graph())
    before = _open.get(found.graph)
    _open[found.graph] = found
    try:
        yield found
    finally:
        _open.pop(found.graph)
        if before is not None:
            _open[found.graph] = before


def backward_begins() -> None:
    """Note that what is traced from now on is backward."""
    found = _open.get(tf.compat.v1.get_default_graph())
    if found is not None:
        found.n_forward = len(found.graph.get_operations())


def noted(name: str, call: Callable[..., Any]) -> Any:
    """Return the result of ``call()``, its operations noted as block ``name``'s, with the blocks within it."""
    if _instead and tf.executing_eagerly():
        return _instead[-1](name, call)
    graph = tf.compat.v1.get_default_graph()
    found = _open.get(graph)
    if found is None:
        outer = getattr(graph, "outer_graph", None)
        while outer is not None:
            if outer in _open:
                _open[outer].inner.add(name)
            outer = getattr(outer, "outer_graph", None)
        return call()
    if found.depth:
        found.within.add(name)
    if found.depth or found.n_forward >= 0:
        return call()
    begin = len(graph.get_operations())
    found.depth += 1
    try:
        return call()
    finally:
        found.depth -= 1
        found.calls.append(Call(name, begin, len(graph.get_operations())))


@contextlib.contextmanager
def instead(work: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
    """Replace eager calls of blocks by ``work(name, call)`` within."""
    _instead.append(work)
    try:
        yield
    finally:
        _instead.pop()


class Block:
    """The operations of a call's forward that can be repeated, and the reads of them in backward.

    ``free``: tensors that need not be kept, by name: operations without a state, less what forward itself reads outside
    of the block. ``uses``: (operation of backward, number of its input, tensor) for each read of one.
    """

    def __init__(self, call: Call, ops: Sequence[Any], number: dict[str, int], n_forward: int) -> None:
        self.name = call.name
        self.ops = ops[call.begin:call.end]
        inside = {op.name for op in self.ops}
        kept = {source(t).name for op in self.ops for t in op.outputs
                if any(c.name not in inside and number.get(c.name, n_forward) < n_forward for c in t.consumers())}
        constant: set[str] = set()  # folded once for all readers
        self.free: set[str] = set()
        for op in self.ops:
            if op.type != "Placeholder" and all(t.op.type == "Const" or t.op.name in constant for t in op.inputs):
                constant.add(op.name)
            elif repeatable(op):
                self.free |= {t.name for t in op.outputs
                              if source(t).name not in kept and source(t).op.name in inside}
        self.uses = [(op, i, t) for op in ops[n_forward:] for i, t in enumerate(op.inputs) if t.name in self.free]

    def tensors(self) -> list[Any]:
        """Return the tensors of `uses`, each once."""
        return list({t.name: t for _, _, t in self.uses}.values())

    def needed(self) -> list[Any]:
        """Return the operations to copy, in their order."""
        found: set[str] = set()
        todo = [t.op for t in self.tensors()]
        while todo:
            op = todo.pop()
            if op.name not in found:
                found.add(op.name)
                todo += [t.op for t in op.inputs if t.name in self.free]
        return [op for op in self.ops if op.name in found]

    def inputs(self) -> dict[str, Any]:
        """Return the tensors, by name, that the copies read and that have to be kept for them."""
        needed = self.needed()
        made = {op.name for op in needed}
        return {source(t).name: source(t) for op in needed for t in op.inputs if t.op.name not in made
                and source(t).op.type not in ("Const", "Placeholder", *_READS)}

    def read(self) -> dict[str, Any]:
        """Return the tensors, by name, that backward reads of this block and that need not be kept."""
        return {source(t).name: source(t) for t in self.tensors()}


def blocks(found: Recording, names: Iterable[str]) -> list[Block]:
    """Return the calls of the blocks ``names``, the last one first."""
    wanted, ops = set(names), found.graph.get_operations()
    number = {op.name: i for i, op in enumerate(ops)}
    return [Block(call, ops, number, found.n_forward) for call in reversed(found.calls) if call.name in wanted]


def rewrite(found: Recording, names: Iterable[str]) -> None:
    """Have backward recompute the blocks ``names``; called once, when forward and backward are traced.

    The graph is traced as always: the model's own forward, once, and TensorFlow's gradient of it. Then every read of
    backward in a tensor of a chosen block's forward is pointed at a copy of the operations that made it. So gradients
    keep their operations and order, and whatever has a state happens once: an operation that draws from a stateful
    generator, reads or writes a variable or talks to other ranks is never copied; its result is kept for the copies.
    Keras' own random operations are functions of a seed that forward has read, so a copy gives the same mask.
    """
    chosen = [block for block in blocks(found, names) if block.uses]
    if not chosen:
        return
    followers = _Followers(found.graph.get_operations())
    backward = {op.name for op in found.graph.get_operations()[found.n_forward:]}
    before: dict[str, list[Any]] = {}
    there: list[Any] = []
    for block in chosen:
        readers = {op.name: op for op, _, _ in block.uses}
        after = followers.of(readers.values())
        device = block.ops[0].device
        # What is ready when the block's gradient arrives: what its backward reads and what does not come of it.
        waits = {t.op.name: t.op for op in readers.values() for t in op.inputs if t.op.name in backward}
        waits |= {op.name: op for op in before.get(device, ())}
        waits = {name: op for name, op in waits.items() if name not in after and name not in readers}
        if waits:
            there += _copy(found.graph, block, list(waits.values()), followers)
            before[device] = list(readers.values())
    with tf.device("CPU:0"), tf.control_dependencies(there):
        tf.timestamp("remat/there")  # has a state, so that the graph runs it and what it waits for


def _copy(graph: Any, block: Block, waits: Sequence[Any], followers: _Followers) -> list[Any]:
    """Copy what backward reads of ``block``, to be computed after ``waits``; return what has to run as well.

    TensorFlow's optimizer merges operations with equal inputs, and its executor starts whatever has its inputs. So the
    first copies wait by a control edge, which tells them apart and holds them back, until the gradient of the block's
    output is there and the block recomputed before has been read.
    """
    made: dict[str, Any] = {}
    held: dict[str, Any] = {}
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(f"remat/{block.name}"):
        with tf.control_dependencies(waits):
            start = tf.no_op("start")
        for op in waits:
            followers.add(op, start)

        def hold(t: Any) -> Any:
            """``t``, once ``start`` has run. Not the reading operation waits: then it would not be fused as before."""
            if t.name not in held:
                with tf.control_dependencies([start]):
                    held[t.name] = _identity(t, "held")
                followers.add(start, held[t.name].op)
            return held[t.name]

        for op in block.needed():
            inputs = [made.get(t.name, t) for t in op.inputs]
            if not any(t.name in made for t in op.inputs):
                i = _first(op)
                inputs[i] = hold(inputs[i])
            copy = graph._create_op_internal(
                op.type, inputs, [t.dtype for t in op.outputs], name=op.name.rpartition("/")[2],
                attrs=dict(op.node_def.attr), op_def=op.op_def, compute_device=False)
            copy._set_device(op.device)
            for old, new in zip(op.outputs, copy.outputs):
                new.set_shape(old.shape)
                made[old.name] = new
            for t in inputs:
                followers.add(t.op, copy)
        for op, i, t in block.uses:
            op._update_input(i, made[t.name])
            followers.add(made[t.name].op, op)
        # The optimizer shall not treat as read once what was read by forward and backward: it would fuse it with what
        # comes after it, into an operation that rounds otherwise.
        return [_identity(each, "seen").op for t in block.tensors() for each in (t, made[t.name])]


def _identity(tensor: Any, name: str) -> Any:
    same = tf.raw_ops.Identity(input=tensor, name=name)
    same.op._set_device(tensor.op.device)
    return same


def _first(op: Any) -> int:
    """Return the input of ``op`` that is held back: no constant, and no variable if there is another."""
    ranks = [(source(t).op.type == "Const", source(t).op.type in _READS) for t in op.inputs]
    return ranks.index(min(ranks))


class _Followers:
    """The edges of a graph, by the operation that they leave."""

    def __init__(self, ops: Sequence[Any]) -> None:
        self._next: dict[str, list[Any]] = {}
        for op in ops:
            for before in (*(t.op for t in op.inputs), *op.control_inputs):
                self.add(before, op)

    def add(self, before: Any, op: Any) -> None:
        self._next.setdefault(before.name, []).append(op)

    def of(self, ops: Iterable[Any]) -> set[str]:
        """Return the names of all that comes after ``ops``, at whatever distance."""
        found: set[str] = set()
        todo = list(ops)
        while todo:
            for op in self._next.get(todo.pop().name, ()):
                if op.name not in found:
                    found.add(op.name)
                    todo.append(op)
        return found


def source(tensor: Any) -> Any:
    """Return the tensor whose memory ``tensor`` is a view of."""
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor


def nbytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors whose shapes are known; anything but arrays of numbers counts 0."""
    return sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors
               if t.dtype not in (tf.resource, tf.variant, tf.string))


def repeatable(op: Any) -> bool:
    """Return whether ``op`` gives the same again: neither it nor what it calls has a state."""
    # Horovod does not mark its operations.
    return not (op.op_def.is_stateful or op.type in _KEPT or op.type.startswith("Horovod"))
