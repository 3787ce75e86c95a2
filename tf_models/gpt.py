"""A small decoder-only transformer for next-token prediction; twin of `torch_models/gpt.py`.

Owns: the layers, their names, and the loss over tokens (`task`). Does not own: tokenising, sampling, anything
distributed.

Pre-LayerNorm, learned positions, causal attention, GELU (tanh form), untied output weights.
"""
from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_models import is_count, require

EPSILON = 1e-5       # of every LayerNorm, in both twins
INIT_STD = 0.02      # of linear and embedding weights, as in GPT-2
IGNORED = -1         # a target that does not count


@keras.saving.register_keras_serializable(package="tf_models")
class GPT(keras.Model):
    """A chain of named blocks; x (B, T) token numbers, T <= context -> logits (B, T, vocab)."""

    def __init__(self, vocab: int, context: int, width: int, depth: int, heads: int, dropout: float,
                 **kwargs: Any):
        super().__init__(**{"name": "gpt", **kwargs})
        self.settings = {"vocab": vocab, "context": context, "width": width, "depth": depth, "heads": heads,
                         "dropout": dropout}
        self.chain = [Embed(vocab, context, width, dropout, name="embed")]
        # GPT-2's rule: 2 * depth branches add into the residual stream.
        self.chain += [Block(width, heads, dropout, INIT_STD / (2 * depth) ** 0.5, name=f"block_{index}")
                       for index in range(depth)]
        self.chain.append(Head(width, vocab, name="head"))
        self(keras.Input((context,), dtype="int64"))  # creates the variables, without running anything

    def call(self, x, training=None):  # Keras hands `training` on to the blocks
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class Embed(keras.layers.Layer):
    """Sum of token and position embeddings: (B, T) -> (B, T, width)."""

    def __init__(self, vocab: int, context: int, width: int, dropout: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.context = context
        self.tokens = keras.layers.Embedding(vocab, width, embeddings_initializer=normal(), name="tokens")
        self.positions = keras.layers.Embedding(context, width, embeddings_initializer=normal(),
                                                name="positions")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape) -> None:
        self.tokens.build()
        self.positions.build()

    def call(self, x):
        T = x.shape[1]
        require(T is None or T <= self.context, "sequence", T, f"at most {self.context} tokens (context)")
        return self.dropout(self.tokens(x) + self.positions(ops.arange(ops.shape(x)[1])))


class Attention(keras.layers.Layer):
    """Causal self-attention: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, out_std: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.width, self.heads = width, heads
        self.qkv = linear(3 * width, INIT_STD, name="qkv")
        self.out = linear(width, out_std, name="out")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape) -> None:
        self.qkv.build(input_shape)
        self.out.build(input_shape)

    def call(self, x):
        B, T = ops.shape(x)[:2]
        qkv = ops.reshape(self.qkv(x), (B, T, 3, self.heads, self.width // self.heads))
        q, k, v = ops.unstack(ops.transpose(qkv, (2, 0, 3, 1, 4)), 3)
        scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) / (self.width // self.heads) ** 0.5
        position = ops.arange(T)
        past = position[None, :] <= position[:, None]
        # Softmax in fp32 whatever the compute type is; -1e9 and not -inf, whose gradient is nan.
        shares = ops.softmax(ops.where(past, ops.cast(scores, "float32"), -1e9))
        mixed = ops.matmul(self.dropout(ops.cast(shares, self.compute_dtype)), v)
        return self.out(ops.reshape(ops.swapaxes(mixed, 1, 2), (B, T, self.width)))


class Block(keras.layers.Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, out_std: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm_attention = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm_attention")
        self.attention = Attention(width, heads, dropout, out_std, name="attention")
        self.norm_mlp = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm_mlp")
        self.mlp_in = linear(4 * width, INIT_STD, name="mlp_in")
        self.mlp_out = linear(width, out_std, name="mlp_out")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape) -> None:
        for layer in (self.norm_attention, self.attention, self.norm_mlp, self.mlp_in):
            layer.build(input_shape)
        self.mlp_out.build((*input_shape[:-1], 4 * input_shape[-1]))

    def call(self, x):
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp_out(ops.gelu(self.mlp_in(self.norm_mlp(x)), approximate=True)))


class Head(keras.layers.Layer):
    """Last LayerNorm and the map to logits: (B, T, width) -> (B, T, vocab)."""

    def __init__(self, width: int, vocab: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm")
        self.logits = linear(vocab, INIT_STD, use_bias=False, name="logits")

    def build(self, input_shape) -> None:
        self.norm.build(input_shape)
        self.logits.build(input_shape)

    def call(self, x):
        return self.logits(self.norm(x))


def normal(std: float = INIT_STD) -> keras.initializers.Initializer:
    """Normal weights of standard deviation `std`."""
    return keras.initializers.RandomNormal(stddev=std)


def linear(out_features: int, std: float, use_bias: bool = True, **kwargs: Any) -> keras.layers.Dense:
    """A linear layer with normal weights of standard deviation `std` and a zero bias."""
    return keras.layers.Dense(out_features, use_bias=use_bias, kernel_initializer=normal(std), **kwargs)


def build(*, vocab: int = 96, context: int = 64, width: int = 128, depth: int = 4, heads: int = 4,
          dropout: float = 0.0) -> GPT:
    """Build the decoder with normal weights (fixed by `keras.utils.set_random_seed`).

    vocab: number of different tokens.
    context: longest sequence, in tokens.
    width: channels of the residual stream; a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads.
    dropout: share of values dropped in training, 0 <= dropout < 1, after the embedding, on attention weights
        and on each residual branch. Above 0 a run depends on the number of ranks.
    Raises ValueError for a size below 1, a width that heads do not divide, or a dropout outside its range.
    """
    sizes = {"vocab": vocab, "context": context, "width": width, "depth": depth, "heads": heads}
    for name, value in sizes.items():
        require(is_count(value), name, value, "a whole number of at least 1")
    require(width % heads == 0, "width", width, f"a multiple of heads ({heads})")
    require(isinstance(dropout, (int, float)) and 0 <= dropout < 1, "dropout", dropout, "0 <= dropout < 1")
    return GPT(vocab, context, width, depth, heads, dropout)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: embed, block_0, ..., head."""
    return [(block.name, block) for block in model.chain]


def task(model: keras.Model, batch: tuple, training: bool | None = None) -> tuple:
    """Return the cross entropy summed over the tokens that count, in nats, and their number; fp32 scalars.

    batch: x (B, T) token numbers and y (B, T) the tokens that follow, -1 where none counts.
    training: as for a Keras model; only dropout asks for it.
    """
    x, y = batch
    logits = ops.cast(model(x, training=training), "float32")
    counted = ops.not_equal(y, IGNORED)
    losses = ops.sparse_categorical_crossentropy(ops.where(counted, y, 0), logits, from_logits=True)
    return ops.sum(ops.where(counted, losses, 0.0)), ops.sum(ops.cast(counted, "float32"))


def weight(batch: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the number of tokens that count in a numpy batch (x (B, T), y (B, T))."""
    return float(np.count_nonzero(batch[1] != IGNORED))


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 64) and y (B, 64), the tokens one later, both int64."""
    x = np.random.default_rng(0).integers(0, 96, (B, 64), dtype=np.int64)
    return x, np.concatenate([x[:, 1:], np.full((B, 1), IGNORED)], axis=1)
