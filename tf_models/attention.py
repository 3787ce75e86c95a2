"""Self-attention and linear layers with normal weights, for the transformers; twin of `torch_models/attention.py`.

Owns: these layers. No model of its own.
"""
from __future__ import annotations

from typing import Any

import keras
from keras import ops


class Attention(keras.layers.Layer):
    """Self-attention: (B, T, width) -> (B, T, width).

    ``causal``: each token sees those before it and itself alone. ``std``, ``out_std``: of the weights.
    """

    def __init__(self, width: int, heads: int, dropout: float, std: float, out_std: float, causal: bool = False,
                 **kwargs: Any):
        super().__init__(**kwargs)
        self.width, self.heads, self.causal = width, heads, causal
        self.qkv = linear(3 * width, std, name="qkv")
        self.out = linear(width, out_std, name="out")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape, seen_shape=None) -> None:
        self.qkv.build(input_shape)
        self.out.build(input_shape)

    def call(self, x, seen=None):
        """``seen``: bool (B, T), the tokens that others may look at; None: all."""
        B, T = ops.shape(x)[:2]
        qkv = ops.reshape(self.qkv(x), (B, T, 3, self.heads, self.width // self.heads))
        q, k, v = ops.unstack(ops.transpose(qkv, (2, 0, 3, 1, 4)), 3)
        # Softmax in fp32 whatever the compute type is; -1e9 and not -inf, whose gradient is nan.
        scores = ops.cast(ops.matmul(q, ops.swapaxes(k, -1, -2)) / (self.width // self.heads) ** 0.5, "float32")
        if self.causal:
            position = ops.arange(T)
            scores = ops.where(position[None, :] <= position[:, None], scores, -1e9)
        if seen is not None:
            scores = ops.where(seen[:, None, None, :], scores, -1e9)
        mixed = ops.matmul(self.dropout(ops.cast(ops.softmax(scores), self.compute_dtype)), v)
        return self.out(ops.reshape(ops.swapaxes(mixed, 1, 2), (B, T, self.width)))


class Tied(keras.layers.Layer):
    """A linear layer with the weights of an embedding, transposed, and perhaps a bias of its own."""

    def __init__(self, table: keras.layers.Embedding, use_bias: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.table, self.use_bias, self.bias = table, use_bias, None

    def build(self, input_shape) -> None:
        if self.use_bias:
            self.bias = self.add_weight(shape=(self.table.input_dim,), initializer="zeros", name="bias")

    def call(self, x):
        y = ops.matmul(x, ops.transpose(self.table.embeddings))
        return y if self.bias is None else y + self.bias


def normal(std: float) -> keras.initializers.Initializer:
    """Return an initializer of normal weights of standard deviation `std`."""
    return keras.initializers.RandomNormal(stddev=std)


def linear(out_features: int, std: float, use_bias: bool = True, **kwargs: Any) -> keras.layers.Dense:
    """Return a linear layer with normal weights of standard deviation `std` and a zero bias."""
    return keras.layers.Dense(out_features, use_bias=use_bias, kernel_initializer=normal(std), **kwargs)
