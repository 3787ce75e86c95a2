"""Carries the weights of a PyTorch model into its Keras twin, block by block and name by name.

Owns: which tensor belongs to which variable, and how the layouts differ. Does not own: models, training.

Twins use the same block names and the same names for the layers inside a block, so "conv.weight" of block
conv_0 is the variable whose path ends in "conv_0/conv/kernel". Only in this folder do both frameworks meet in
one process.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import keras
import numpy as np
import torch
from torch import nn

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)
NORM_NAMES = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean",
              "running_var": "moving_variance"}


class Pair(NamedTuple):
    """A weight in both twins: its name for messages, and the order of torch's axes in the Keras layout."""

    name: str
    tensor: torch.Tensor
    variable: keras.Variable
    axes: tuple[int, ...]

    def to_keras(self, array: np.ndarray) -> np.ndarray:
        """Reorder an array with the torch shape, a weight or its gradient, into the Keras layout."""
        return array.transpose(self.axes)


Blocks = Callable[..., list]


def pairs(torch_model: nn.Module, keras_model: keras.Model, torch_blocks: Blocks,
          keras_blocks: Blocks) -> list[Pair]:
    """Return every weight of the twins once, trainable or not, in torch's order.

    torch_blocks, keras_blocks: the `blocks` functions of the two model files.
    Raises ValueError where block names, weights or shapes do not correspond, naming the weights.
    """
    torch_named, keras_named = dict(torch_blocks(torch_model)), dict(keras_blocks(keras_model))
    if list(torch_named) != list(keras_named):
        raise ValueError(f"blocks: got {list(torch_named)} in torch, {list(keras_named)} in Keras; "
                         "expected the same names in the same order")
    found: list[Pair] = []
    for name in torch_named:
        found += _block_pairs(name, torch_named[name], keras_named[name], found)
    return found


def copy_torch_to_keras(torch_model: nn.Module, keras_model: keras.Model, torch_blocks: Blocks,
                        keras_blocks: Blocks) -> None:
    """Give the Keras twin the torch model's weights and moving statistics; otherwise as `pairs`."""
    for pair in pairs(torch_model, keras_model, torch_blocks, keras_blocks):
        pair.variable.assign(pair.to_keras(pair.tensor.detach().cpu().numpy()))


def _block_pairs(block_name: str, torch_block: nn.Module, keras_block: keras.layers.Layer,
                 before: list[Pair]) -> list[Pair]:
    tied = {id(thing) for pair in before for thing in (pair.tensor, pair.variable)}
    # A dropout's seed is among `variables` and not among `weights`.
    variables = {variable.path.split(f"{keras_block.name}/", 1)[1]: variable
                 for variable in keras_block.weights if id(variable) not in tied}
    tensors = {}
    for path, module in torch_block.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name != "num_batches_tracked" and id(tensor) not in tied:  # a count that Keras does not keep
                keras_name, axes = _layout(module, name, tensor)
                tensors["/".join(filter(None, [*path.split("."), keras_name]))] = tensor, axes
    if tensors.keys() != variables.keys():
        raise ValueError(f"block {block_name}: only one twin has {sorted(tensors.keys() ^ variables.keys())}")
    for name, (tensor, axes) in tensors.items():
        shape = tuple(tensor.shape[axis] for axis in axes)
        if shape != tuple(variables[name].shape):
            raise ValueError(f"{block_name}/{name}: got {shape} from torch; "
                             f"expected {tuple(variables[name].shape)}")
    return [Pair(f"{block_name}/{name}", tensor, variables[name], axes)
            for name, (tensor, axes) in tensors.items()]


def _layout(module: nn.Module, name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the Keras name of a weight of `module`, and the order of its axes there."""
    unchanged = tuple(range(tensor.ndim))
    if isinstance(module, NORMS):
        return NORM_NAMES[name], unchanged
    if isinstance(module, nn.Embedding):
        return "embeddings", unchanged
    if name == "bias":
        return "bias", unchanged
    if isinstance(module, nn.Linear):
        return "kernel", (1, 0)        # (out, in) -> (in, out)
    if isinstance(module, nn.Conv2d):
        return "kernel", (2, 3, 1, 0)  # (out, in, H, W) -> (H, W, in, out)
    if type(module).__module__.startswith("torch_models."):
        return name, unchanged         # a layer's own, such as learned positions
    raise ValueError(f"{type(module).__name__}.{name}: expected Linear, Conv2d, Embedding or a norm")
