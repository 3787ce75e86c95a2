"""The blocks of a Keras model in the order of its forward pass, checked to be all of it, and their costs.

Owns whether a model can be partitioned, and the measurement of blocks in graphs of its own; everything is restored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.task import Phase
from hvdtrain.backends.misfit import told
from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.buffers import VariableCopies, written_in_forward
from hvdtrain.backends.tensorflow.placement import HOST, lent
from hvdtrain.backends.tensorflow.recompute import nbytes, source
from hvdtrain.backends.tensorflow.trial import Trial, free_cached, out_of_memory
from hvdtrain.core.errors import UserError
from hvdtrain.parallel.recovery import attempt_halving
from hvdtrain.planning.pipeline.blocks import Block

DO = "give the model file blocks(model) -> [(name, layer), ...], the forward pass being a loop over them"


class Chain:
    """Named blocks that, one after the other, are the model."""

    def __init__(self, model: keras.Model, blocks: Sequence[tuple[str, Any]]) -> None:
        self.model = model
        self.names = tuple(name for name, _ in blocks)
        self.layers = tuple(layer for _, layer in blocks)
        self.owner = _owners(model, blocks)

    def entry(self, x: Any) -> Any:
        """Convert the input as Keras' functional models do; other models leave that to their blocks."""
        functional = getattr(self.model, "_functional", None) or self.model
        standardize = getattr(functional, "_standardize_inputs", None)
        return x if standardize is None else keras.tree.pack_sequence_as(x, standardize(x))

    def run(self, x: Any, training: bool | None, stage: range | None = None) -> Any:
        """Call the blocks of ``stage`` (all of them without one), as layers that know whether they train."""
        for i in stage or range(len(self.layers)):
            x = self.layers[i](x) if training is None else self.layers[i](x, training=training)
        return x


def chain_of(spec: Any, key: str = "model_parallel") -> Chain:
    """Return the model file's ``blocks``, or the layers of a Sequential model or of a functional one that is a chain.

    Errors: `UserError` for other models, for weights that belong to no block or to two of them.
    """
    model = spec.model
    if spec.blocks is not None:
        blocks = [(str(name), layer) for name, layer in spec.blocks(model)]
        if not blocks or not all(isinstance(layer, keras.layers.Layer) for _, layer in blocks):
            raise UserError("blocks(model) returned something other than named layers", "[(name, keras layer), ...]",
                            "fix the model file's blocks")
    elif isinstance(model, keras.Sequential) or _is_row(model):
        blocks = [(layer.name, layer) for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    else:
        kind = "a functional model with branches" if hasattr(model, "_standardize_inputs") else type(model).__name__
        raise UserError(f"{key} with {kind}, which has no named blocks", "a model that is a chain of blocks", DO)
    return Chain(model, blocks)


def check_same(chain: Chain, batch_x: Any) -> None:
    """Raise `UserError` unless the blocks one after the other give the same as the model for ``batch_x``.

    In evaluation and in training, there with what layers add to the loss. Everything is restored.
    """
    x = tf.nest.map_structure(tf.convert_to_tensor, batch_x)
    if not _alike(chain.model(x, training=False), _by_blocks(chain, x, False)):
        raise UserError("the model's blocks, run in sequence, give an output that differs from the model's",
                        "a forward pass that is a loop over the blocks", DO)
    _check_training(chain, x)


def _check_training(chain: Chain, x: Any) -> None:
    """Run `check_same` in training: from the same random generators, as far as those can be restored."""
    buffers, random = VariableCopies(written_in_forward(chain.model)), state.random_arrays(chain.model)

    def run(forward: Callable[[], Any], layers: Sequence[Any]) -> tuple[Any, Any]:
        buffers.keep()
        try:
            return forward(), _total([loss for layer in layers for loss in layer.losses])
        finally:
            buffers.put_back()
            state.load_random(chain.model, random)

    def whole() -> tuple[Any, Any]:
        return run(lambda: chain.model(x, training=True), [chain.model])

    def parts() -> tuple[Any, Any]:
        return run(lambda: _by_blocks(chain, x, True), chain.layers)

    one, other = whole(), parts()
    if _alike(one, other):
        return
    if not _alike(one, whole()) and not _alike(other, parts()):
        return  # the blocks draw from a generator that cannot be put back: nothing can be said
    if _alike(one[0], other[0]):
        raise UserError(f"the model's blocks add {float(other[1]):.6g} to the loss where the model adds "
                        f"{float(one[1]):.6g}", "add_loss in blocks only", "move losses that the model's own "
                        "call, or a layer between the blocks, adds into a block, or train the model unpartitioned")
    raise UserError("the model's blocks, run in sequence, give an output that differs from the model's in training",
                    "a forward pass that is a loop over the blocks", "move what the model's own call does only "
                    "in training (dropout, `if training`) into blocks, or train the model unpartitioned")


def _by_blocks(chain: Chain, x: Any, training: bool) -> Any:
    for layer in chain.layers:
        layer._clear_losses()
    try:
        return Phase(lambda _, x: chain.run(chain.entry(x), None), None)(x, training=training)
    except (ValueError, TypeError, IndexError, RuntimeError, tf.errors.InvalidArgumentError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"the model's blocks do not run in sequence ({said})", "a chain of blocks",
                        DO) from error


def _total(losses: Sequence[Any]) -> tf.Tensor:
    return tf.add_n([tf.constant(0.0), *(tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses)])


def _alike(one: Any, other: Any) -> bool:
    a, b = tf.nest.flatten(one), tf.nest.flatten(other)
    return len(a) == len(b) and all(_close(x, y) for x, y in zip(a, b))


def _close(a: tf.Tensor, b: tf.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    x, y = (np.asarray(tf.cast(t, tf.float64)) for t in (a, b))
    narrow = a.dtype in (tf.float16, tf.bfloat16)
    return bool(np.allclose(x, y, rtol=3e-2 if narrow else 1e-4, atol=1e-6 + 1e-4 * np.abs(x).max(initial=0.0)))


def _is_row(model: keras.Model) -> bool:
    """Return whether a functional model is one row of layers, each called on the output of the one before."""
    if not hasattr(model, "_standardize_inputs") or len(model.inputs) != 1 or len(model.outputs) != 1:
        return False
    before = model.inputs[0]
    for layer in model.layers:
        if isinstance(layer, keras.layers.InputLayer):
            continue
        calls = [n for n in layer._inbound_nodes if [id(t) for t in n.input_tensors] == [id(before)]]
        if len(calls) != 1 or len(calls[0].outputs) != 1:
            return False
        before = calls[0].outputs[0]
    return before is model.outputs[0]


def _owners(model: keras.Model, blocks: Sequence[tuple[str, Any]]) -> dict[int, int]:
    owner: dict[int, int] = {}
    paths = {id(v): v.path for v in model.variables}
    for i, (name, layer) in enumerate(blocks):
        for variable in layer.variables:
            other = owner.setdefault(id(variable), i)
            if other != i:
                raise UserError(f"blocks {blocks[other][0]} and {name} share {paths.get(id(variable), variable.path)}",
                                "blocks with variables of their own", "put layers that share variables in one block")
    metrics = {id(v) for v in model.metrics_variables}
    stray = [path for key, path in paths.items() if key not in owner and key not in metrics]
    if stray:
        raise UserError(f"variable {stray[0]} belongs to no block", "blocks that hold all of the model's variables", DO)
    return owner


SLOT_S = 0.05
"""About how long one kind of block is timed."""

_FREE = ("Placeholder", "Const", "ReadVariableOp", "VarHandleOp")


class BlockCost(NamedTuple):
    """Cost of one kind of block.

    ``forward_s``: of its forward alone, 0 if that was not timed. ``kept_bytes``: inside it; ``keeps_input``,
    ``keeps_output``: whether backward reads those.
    """

    seconds: float
    forward_s: float
    kept_bytes: int
    keeps_input: bool
    keeps_output: bool


def profile(chain: Chain, sample: Callable[[int], Sequence[Any]], samples: int, device: str,
            entry: Callable[[tuple[Any, ...]], Any], **options: Any) -> tuple[tuple[Block, ...], str]:
    """Return every block with a batch of ``samples``, of which ``entry`` gives the model's input; see `measure`.

    A shortage of memory halves the samples measured; the reason is returned too, "" without a shortage.
    """
    def blocks_of(n: int) -> tuple[Block, ...]:
        found: list[Block] = []

        def work(batch: tuple[Any, ...]) -> list[tf.Tensor]:
            tensors = tf.nest.map_structure(tf.convert_to_tensor, batch)
            found.extend(measure(chain, entry(tensors), device, **options))
            return []

        batch = tuple(sample(n))
        with told(chain.model, batch), tf.device(HOST):
            Trial(chain.model, work)(batch)
        return tuple(found)

    found, n, why = attempt_halving(blocks_of, samples, out_of_memory, free_cached)
    return tuple(block.over(samples / n) for block in found), why


def measure(chain: Chain, batch_x: Any, device: str, apart: bool = False,
            around: Callable[[Any], Any] = contextlib.nullcontext) -> tuple[Block, ...]:
    """Return every block, with inputs of one split micro-batch ``batch_x``; computed on ``device``.

    ``apart``: time forwards alone, too. ``around(variables)``: entered around a block's measurement.
    """
    x = chain.entry(tf.nest.map_structure(tf.convert_to_tensor, batch_x))
    known: dict[Any, tuple[BlockCost, Any]] = {}
    costs: list[BlockCost] = []
    edges_bytes = [nbytes(tf.nest.flatten(x))]
    for layer in chain.layers:
        kind = _kind(layer, x)
        if kind not in known:
            # A block at a time: not all may fit.
            with around(layer.variables), lent(layer.variables if "GPU" in device else (), device):
                known[kind] = _measured(layer, x, device, apart)
        cost, x = known[kind]
        costs.append(cost)
        edges_bytes.append(nbytes(tf.nest.flatten(x)))
    blocks = []
    for i, (name, layer, cost) in enumerate(zip(chain.names, chain.layers, costs)):
        kept = cost.kept_bytes + (edges_bytes[i] if cost.keeps_input else 0)
        if cost.keeps_output and not (i + 1 < len(costs) and costs[i + 1].keeps_input):
            kept += edges_bytes[i + 1]
        blocks.append(Block(name, cost.seconds, state.nbytes(layer.weights), kept,
                            cost.forward_s, edges_bytes[i + 1]))
    return tuple(blocks)


def _kind(layer: Any, x: Any) -> Any:
    """Return a key that is the same for two blocks of the same cost and result."""
    inside = tuple((type(part).__name__, part.compute_dtype, _settings(part)) for part in layer._flatten_layers())
    weights = tuple((tuple(v.shape), v.dtype) for v in layer.weights)
    return inside, weights, tuple((t.dtype, tuple(t.shape)) for t in tf.nest.flatten(x)), tf.nest.flatten(x)[0] is None


def _settings(layer: Any) -> str:
    """Return a layer's numbers and strings, such as ``return_sequences``, except its name."""
    return str(sorted((key, list(value) if isinstance(value, (list, tuple)) else value)
                      for key, value in vars(layer).items() if "name" not in key and "path" not in key
                      and all(isinstance(x, (bool, int, float, str, type(None)))
                              for x in (value if isinstance(value, (list, tuple)) else [value]))))


def _measured(layer: Any, x: Any, device: str, apart: bool) -> tuple[BlockCost, Any]:
    variables = [v.value for v in layer.trainable_variables]
    n_forward = 0

    def graph(x: Any) -> Any:
        nonlocal n_forward
        with tf.device(device), tf.GradientTape() as tape:
            inputs = _floats(x)
            tape.watch(inputs)
            y = layer(x, training=True)
            n_forward = len(tf.compat.v1.get_default_graph().get_operations())
        with tf.device(device):
            grads = tape.gradient(_floats(y), inputs + variables) if _floats(y) and inputs + variables else []
        return y, [tf.convert_to_tensor(g) for g in grads if g is not None]

    function = tf.function(graph, jit_compile=False, autograph=False)
    concrete = function.get_concrete_function(x)
    kept_bytes, keeps_input, keeps_output = _kept(concrete, n_forward)
    y, _ = function(x)
    seconds, forward_s = _seconds(function, x), 0.0
    if apart:
        forward = tf.function(lambda x: _on(device, layer, x), jit_compile=False, autograph=False)
        forward(x)
        forward_s = min(_seconds(forward, x), seconds)
    return BlockCost(seconds, forward_s, kept_bytes, keeps_input, keeps_output), y


def _on(device: str, layer: Any, x: Any) -> Any:
    with tf.device(device):
        return layer(x, training=True)


def _seconds(function: Any, x: Any) -> float:
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < SLOT_S and len(seconds) < 50:
        begin = time.perf_counter()
        for tensor in tf.nest.flatten(function(x))[-1:]:
            tensor.numpy()  # waits for a GPU
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def _kept(concrete: Any, n_forward: int) -> tuple[int, bool, bool]:
    """Return (bytes of forward's tensors that backward reads, whether it reads the input, whether the output)."""
    operations = concrete.graph.get_operations()
    forward = {op.name for op in operations[:n_forward]}
    captured = {inner.name for _, inner in concrete.graph.captures}
    given = {t.name for t in concrete.graph.inputs} - captured
    returned = {source(t).name for t in concrete.graph.outputs}
    kept: dict[str, Any] = {}
    for op in operations[n_forward:]:
        for tensor in op.inputs:
            base = source(tensor)
            if base.op.name in forward and base.dtype != tf.resource:
                kept[base.name] = base
    inner = [t for name, t in kept.items() if name not in given | returned and t.op.type not in _FREE]
    return nbytes(inner), bool(given & kept.keys()), bool(returned & kept.keys())


def _floats(tensors: Any) -> list[Any]:
    return [t for t in tf.nest.flatten(tensors) if tf.is_tensor(t) and t.dtype.is_floating]
