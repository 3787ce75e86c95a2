"""A small decoder-only transformer for next-token prediction; twin of `torch_models/gpt.py`.

Owns: the layers, their names, and the loss over tokens (`task`). Does not own: tokenising, sampling, anything
distributed.

Pre-LayerNorm, learned positions, causal attention, GELU (tanh form). `gpt2_small` and `gpt2_medium` have the sizes of
A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, and its tied output weights.
"""
from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_models import is_count, require
from tf_models.attention import Attention, Tied, linear, normal

EPSILON = 1e-5       # of every LayerNorm, in both twins
INIT_STD = 0.02      # of linear and embedding weights, as in GPT-2
IGNORED = -1         # a target that does not count


@keras.saving.register_keras_serializable(package="tf_models")
class GPT(keras.Model):
    """A chain of named blocks; x (B, T) token numbers, T <= context -> logits (B, T, vocab)."""

    def __init__(self, vocab: int, context: int, width: int, depth: int, heads: int, dropout: float,
                 tied: bool = False, **kwargs: Any):
        super().__init__(**{"name": "gpt", **kwargs})
        self.settings = {"vocab": vocab, "context": context, "width": width, "depth": depth, "heads": heads,
                         "dropout": dropout, "tied": tied}
        self.chain = [Embed(vocab, context, width, dropout, name="embed")]
        # GPT-2's rule: 2 * depth branches add into the residual stream.
        self.chain += [Block(width, heads, dropout, INIT_STD / (2 * depth) ** 0.5, name=f"block_{index}")
                       for index in range(depth)]
        self.chain.append(Head(width, vocab, self.chain[0].tokens if tied else None, name="head"))
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
        self.tokens = keras.layers.Embedding(vocab, width, embeddings_initializer=normal(INIT_STD), name="tokens")
        self.positions = keras.layers.Embedding(context, width, embeddings_initializer=normal(INIT_STD),
                                                name="positions")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape) -> None:
        self.tokens.build()
        self.positions.build()

    def call(self, x):
        T = x.shape[1]
        require(T is None or T <= self.context, "sequence", T, f"at most {self.context} tokens (context)")
        return self.dropout(self.tokens(x) + self.positions(ops.arange(ops.shape(x)[1])))


class Block(keras.layers.Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, out_std: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm_attention = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm_attention")
        self.attention = Attention(width, heads, dropout, INIT_STD, out_std, causal=True, name="attention")
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
    """Last LayerNorm and the map to logits, with the weights of ``table``: (B, T, width) -> (B, T, vocab)."""

    def __init__(self, width: int, vocab: int, table: keras.layers.Embedding | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm")
        self.logits = (linear(vocab, INIT_STD, use_bias=False, name="logits") if table is None
                       else Tied(table, use_bias=False, name="logits"))

    def build(self, input_shape) -> None:
        self.norm.build(input_shape)
        self.logits.build(input_shape)

    def call(self, x):
        return self.logits(self.norm(x))


def build(*, vocab: int = 96, context: int = 64, width: int = 128, depth: int = 4, heads: int = 4,
          dropout: float = 0.0, tied: bool = False) -> GPT:
    """Build the decoder with normal weights (fixed by `keras.utils.set_random_seed`).

    vocab: number of different tokens.
    context: longest sequence, in tokens.
    width: channels of the residual stream; a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads.
    dropout: share of values dropped in training, 0 <= dropout < 1, after the embedding, on attention weights
        and on each residual branch. Above 0 a run depends on the number of ranks.
    tied: one matrix for token embeddings and logits; such a model cannot be cut between its first and last block.
    Raises ValueError for a size below 1, a width that heads do not divide, or a dropout outside its range.
    """
    sizes = {"vocab": vocab, "context": context, "width": width, "depth": depth, "heads": heads}
    for name, value in sizes.items():
        require(is_count(value), name, value, "a whole number of at least 1")
    require(width % heads == 0, "width", width, f"a multiple of heads ({heads})")
    require(isinstance(dropout, (int, float)) and 0 <= dropout < 1, "dropout", dropout, "0 <= dropout < 1")
    return GPT(vocab, context, width, depth, heads, dropout, tied)


def gpt2_small(*, vocab: int = 50257, context: int = 1024, dropout: float = 0.1, tied: bool = True) -> GPT:
    """Build GPT-2's smallest: 124,439,808 parameters (untied 38.6M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=768, depth=12, heads=12, dropout=dropout, tied=tied)


def gpt2_medium(*, vocab: int = 50257, context: int = 1024, dropout: float = 0.1, tied: bool = True) -> GPT:
    """Build GPT-2's second: 354,823,168 parameters (untied 51.5M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=1024, depth=24, heads=16, dropout=dropout, tied=tied)


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
