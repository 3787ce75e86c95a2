"""An encoder-only transformer for masked language modelling; twin of `torch_models/bert.py`.

Owns: the layers, their names, and the loss over masked tokens (`task`). Does not own: tokenising, masking, anything
distributed.

J. Devlin et al., "BERT", NAACL 2019: sum of token, position and segment embeddings (one segment here), post-LayerNorm
blocks, GELU, and before the logits one more layer. Sizes below base are those of I. Turc et al., "Well-Read Students
Learn Better", 2019.
"""
from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_models import is_count, require
from tf_models.attention import Attention, Tied, linear, normal

EPSILON = 1e-12      # of every LayerNorm, in both twins
INIT_STD = 0.02      # of linear and embedding weights
IGNORED = -1         # a target that does not count
SEGMENTS = 2         # of which a masked language model on plain text uses the first


@keras.saving.register_keras_serializable(package="tf_models")
class BERT(keras.Model):
    """A chain of named blocks; x (B, T) token numbers, T <= context -> logits (B, T, vocab)."""

    def __init__(self, vocab: int, context: int, width: int, depth: int, heads: int, pad: int, dropout: float,
                 tied: bool, **kwargs: Any):
        super().__init__(**{"name": "bert", **kwargs})
        self.settings = {"vocab": vocab, "context": context, "width": width, "depth": depth, "heads": heads,
                         "pad": pad, "dropout": dropout, "tied": tied}
        self.chain = [Embed(vocab, context, width, pad, dropout, name="embed")]
        self.chain += [Block(width, heads, dropout, name=f"block_{index}") for index in range(depth)]
        self.chain.append(Head(width, vocab, self.chain[0].tokens if tied else None, name="head"))
        self(keras.Input((context,), dtype="int64"))  # creates the variables, without running anything

    def call(self, x, training=None):  # Keras hands `training` on to the blocks
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class Embed(keras.layers.Layer):
    """Normed sum of token, position and segment embeddings: (B, T) -> ((B, T, width), seen)."""

    def __init__(self, vocab: int, context: int, width: int, pad: int, dropout: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.context, self.pad, self.width = context, pad, width
        self.tokens, self.positions, self.segments = (
            keras.layers.Embedding(rows, width, embeddings_initializer=normal(INIT_STD), name=name)
            for name, rows in (("tokens", vocab), ("positions", context), ("segments", SEGMENTS)))
        self.norm = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape) -> None:
        for table in (self.tokens, self.positions, self.segments):
            table.build()
        self.norm.build((None, None, self.width))

    def call(self, x):
        T = x.shape[1]
        require(T is None or T <= self.context, "sequence", T, f"at most {self.context} tokens (context)")
        y = self.tokens(x) + self.positions(ops.arange(ops.shape(x)[1])) + self.segments(ops.zeros_like(x))
        return self.dropout(self.norm(y)), ops.not_equal(x, self.pad)


class Block(keras.layers.Layer):
    """norm(x + attention(x)), then norm(x + mlp(x)): ((B, T, width), seen) -> ((B, T, width), seen)."""

    def __init__(self, width: int, heads: int, dropout: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.attention = Attention(width, heads, dropout, INIT_STD, INIT_STD, name="attention")
        self.norm_attention = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm_attention")
        self.mlp_in = linear(4 * width, INIT_STD, name="mlp_in")
        self.mlp_out = linear(width, INIT_STD, name="mlp_out")
        self.norm_mlp = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm_mlp")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape) -> None:
        shape = tuple(input_shape[0])
        for layer in (self.attention, self.norm_attention, self.mlp_in, self.norm_mlp):
            layer.build(shape)
        self.mlp_out.build((*shape[:-1], 4 * shape[-1]))

    def call(self, came):
        x, seen = came
        x = self.norm_attention(x + self.dropout(self.attention(x, seen)))
        y = self.mlp_out(ops.gelu(self.mlp_in(x), approximate=False))
        return self.norm_mlp(x + self.dropout(y)), seen


class Head(keras.layers.Layer):
    """A layer more and the map to logits, with the weights of ``table``: ((B, T, width), seen) -> (B, T, vocab)."""

    def __init__(self, width: int, vocab: int, table: keras.layers.Embedding | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.linear = linear(width, INIT_STD, name="linear")
        self.norm = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm")
        self.logits = linear(vocab, INIT_STD, name="logits") if table is None else Tied(table, name="logits")

    def build(self, input_shape) -> None:
        shape = tuple(input_shape[0])
        for layer in (self.linear, self.norm, self.logits):
            layer.build(shape)

    def call(self, came):
        return self.logits(self.norm(ops.gelu(self.linear(came[0]), approximate=False)))


def build(*, vocab: int = 96, context: int = 64, width: int = 128, depth: int = 4, heads: int = 4, pad: int = 0,
          dropout: float = 0.0, tied: bool = False) -> BERT:
    """Build the encoder with normal weights (fixed by `keras.utils.set_random_seed`).

    vocab: number of different tokens.
    context: longest sequence, in tokens.
    width: channels of the residual stream; a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads.
    pad: the token that fills sequences up, which nobody looks at; -1: none does.
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
    return BERT(vocab, context, width, depth, heads, pad, dropout, tied)


def bert_mini(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
              tied: bool = True) -> BERT:
    """Build BERT-Mini: 11,201,594 parameters (untied 7.8M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=256, depth=4, heads=4, pad=pad, dropout=dropout, tied=tied)


def bert_small(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
               tied: bool = True) -> BERT:
    """Build BERT-Small: 28,795,194 parameters (untied 15.6M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=512, depth=4, heads=8, pad=pad, dropout=dropout, tied=tied)


def bert_medium(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
                tied: bool = True) -> BERT:
    """Build BERT-Medium: 41,404,730 parameters (untied 15.6M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=512, depth=8, heads=8, pad=pad, dropout=dropout, tied=tied)


def bert_base(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
              tied: bool = True) -> BERT:
    """Build BERT-Base: 109,514,298 parameters (untied 23.4M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=768, depth=12, heads=12, pad=pad, dropout=dropout, tied=tied)


def bert_large(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
               tied: bool = True) -> BERT:
    """Build BERT-Large: 335,174,458 parameters (untied 31.3M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=1024, depth=24, heads=16, pad=pad, dropout=dropout, tied=tied)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: embed, block_0, ..., head."""
    return [(block.name, block) for block in model.chain]


def task(model: keras.Model, batch: tuple, training: bool | None = None) -> tuple:
    """Return the cross entropy summed over the tokens that count, in nats, and their number, both scalars.

    batch: x (B, T) token numbers, some of them masked, and y (B, T) what these were, -1 elsewhere.
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
    """Return the same B samples at every call: x (B, 64) with a seventh masked (95), y (B, 64), both int64."""
    y = np.random.default_rng(0).integers(1, 95, (B, 64), dtype=np.int64)
    masked = np.arange(64) % 7 == 3
    return np.where(masked, 95, y), np.where(masked, y, IGNORED)
