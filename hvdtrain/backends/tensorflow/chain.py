"""The blocks of a Keras model in the order of its forward pass, checked to be all of it.

Owns whether a model can be partitioned, in evaluation and in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.task import Phase
from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.buffers import VariableCopies, written_in_forward
from hvdtrain.core.errors import UserError

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
            raise UserError("blocks(model) gave something else than named layers", "[(name, keras layer), ...]",
                            "fix the model file's blocks")
    elif isinstance(model, keras.Sequential) or _is_row(model):
        blocks = [(layer.name, layer) for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    else:
        kind = "a functional model with branches" if hasattr(model, "_standardize_inputs") else type(model).__name__
        raise UserError(f"{key} with {kind}, which names no blocks", "a model that is a chain of blocks", DO)
    return Chain(model, blocks)


def check_same(chain: Chain, batch_x: Any) -> None:
    """Raise `UserError` unless the blocks one after the other give the same as the model for ``batch_x``.

    In evaluation and in training, there with what layers add to the loss. Everything is restored.
    """
    x = tf.nest.map_structure(tf.convert_to_tensor, batch_x)
    if not _alike(chain.model(x, training=False), _by_blocks(chain, x, False)):
        raise UserError("the model's blocks, run one after the other, give something else than the model",
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
                        f"{float(one[1]):.6g}", "add_loss in blocks only", "put what the model's own call, or a layer "
                        "between the blocks, adds to the loss into a block, or train the model whole")
    raise UserError("the model's blocks, run one after the other, give something else than the model while it trains",
                    "a forward pass that is a loop over the blocks", "put what the model's own call does only while "
                    "training (dropout, `if training`) into blocks, or train the model whole")


def _by_blocks(chain: Chain, x: Any, training: bool) -> Any:
    for layer in chain.layers:
        layer._clear_losses()
    try:
        return Phase(lambda _, x: chain.run(chain.entry(x), None), None)(x, training=training)
    except (ValueError, TypeError, IndexError, RuntimeError, tf.errors.InvalidArgumentError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"the model's blocks do not run one after the other ({said})", "a chain of blocks",
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
                                "blocks with variables of their own", "put what shares variables in one block")
    metrics = {id(v) for v in model.metrics_variables}
    stray = [path for key, path in paths.items() if key not in owner and key not in metrics]
    if stray:
        raise UserError(f"variable {stray[0]} belongs to no block", "blocks that hold all of the model's variables", DO)
    return owner
