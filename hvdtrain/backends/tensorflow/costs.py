"""Cost of each block of a chain: seconds of forward and backward, bytes of variables, bytes kept for backward.

Owns the measurement, in graphs of its own; blocks of one kind (class, shapes of weights and inputs) are measured once.
Everything is restored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.backends.misfit import told
from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.chain import Chain
from hvdtrain.backends.tensorflow.placement import HOST, lent
from hvdtrain.backends.tensorflow.recompute import nbytes, source
from hvdtrain.backends.tensorflow.trial import Trial, free_cached, out_of_memory
from hvdtrain.parallel.recovery.attempt import attempt_halving
from hvdtrain.planning.pipeline.blocks import Block

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
