"""Vision transformers for images, channels last; twin of `torch_models/vit.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

A. Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, table 1: patches through one linear map, a class
token in front, learned positions, pre-LayerNorm blocks, one linear map of the class token. Tiny and Small are those of
H. Touvron et al., "Training data-efficient image transformers", ICML 2021.
"""
from __future__ import annotations

from typing import Any, Sequence

import keras
import numpy as np
from keras import ops

from tf_models import counts, is_count, require
from tf_models.attention import Attention, linear, normal

EPSILON = 1e-6   # of every LayerNorm, in both twins
INIT_STD = 0.02  # of linear and embedding weights


@keras.saving.register_keras_serializable(package="tf_models")
class ViT(keras.Model):
    """A chain of named blocks; x (B, H, W) or (B, H, W, C) -> logits (B, classes)."""

    def __init__(self, in_shape: Sequence[int], patch: int, width: int, depth: int, heads: int, classes: int,
                 dropout: float, **kwargs: Any):
        super().__init__(**{"name": "vit", **kwargs})
        self.settings = {"in_shape": list(in_shape), "patch": patch, "width": width, "depth": depth, "heads": heads,
                         "classes": classes, "dropout": dropout}
        self.chain = [Embed((*in_shape, 1)[:3], patch, width, dropout, name="embed")]
        self.chain += [Block(width, heads, dropout, name=f"block_{index}") for index in range(depth)]
        self.chain.append(Head(classes, name="head"))
        self(keras.Input(tuple(in_shape)))  # creates the variables, without running anything

    def call(self, x, training=None):  # Keras hands `training` on to the blocks
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class Embed(keras.layers.Layer):
    """Patches, class token and positions: (B, H, W[, C]) -> (B, 1 + H / patch * W / patch, width)."""

    def __init__(self, shape_HWC: Sequence[int], patch: int, width: int, dropout: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.shape_HWC, self.patch, self.width = tuple(shape_HWC), patch, width
        self.patches = linear(width, INIT_STD, name="patches")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape) -> None:
        H, W, C = self.shape_HWC
        self.patches.build((None, None, self.patch * self.patch * C))
        self.token = self.add_weight(shape=(1, 1, self.width), initializer="zeros", name="token")
        self.positions = self.add_weight(shape=(1, 1 + H // self.patch * (W // self.patch), self.width),
                                         initializer=normal(INIT_STD), name="positions")

    def call(self, x):
        (H, W, C), P = self.shape_HWC, self.patch
        got = tuple(x.shape[1:])
        require(got == (H, W, C) or (got, C) == ((H, W), 1), "images", got,
                f"{(H, W, C)} a sample, channels last")
        B = ops.shape(x)[0]
        x = ops.transpose(ops.reshape(x, (B, H // P, P, W // P, P, C)), (0, 1, 3, 2, 4, 5))
        x = self.patches(ops.reshape(x, (B, H // P * (W // P), P * P * C)))
        token = ops.broadcast_to(ops.cast(self.token, x.dtype), (B, 1, self.width))
        return self.dropout(ops.concatenate([token, x], 1) + ops.cast(self.positions, x.dtype))


class Block(keras.layers.Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm_attention = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm_attention")
        self.attention = Attention(width, heads, dropout, INIT_STD, INIT_STD, name="attention")
        self.norm_mlp = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm_mlp")
        self.mlp_in = linear(4 * width, INIT_STD, name="mlp_in")
        self.mlp_out = linear(width, INIT_STD, name="mlp_out")
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, input_shape) -> None:
        for layer in (self.norm_attention, self.attention, self.norm_mlp, self.mlp_in):
            layer.build(input_shape)
        self.mlp_out.build((*input_shape[:-1], 4 * input_shape[-1]))

    def call(self, x):
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp_out(ops.gelu(self.mlp_in(self.norm_mlp(x)), approximate=False)))


class Head(keras.layers.Layer):
    """Last LayerNorm, and one linear map of the class token: (B, T, width) -> (B, classes)."""

    def __init__(self, classes: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm")
        self.linear = linear(classes, INIT_STD, name="linear")

    def build(self, input_shape) -> None:
        self.norm.build((None, input_shape[-1]))
        self.linear.build((None, input_shape[-1]))

    def call(self, x):
        return self.linear(self.norm(x[:, 0]))


def build(*, in_shape: Sequence[int] = (32, 32, 3), patch: int = 4, width: int = 64, depth: int = 4, heads: int = 4,
          classes: int = 10, dropout: float = 0.0) -> ViT:
    """Build the network with normal weights (fixed by `keras.utils.set_random_seed`).

    in_shape: one sample, (H, W) or (H, W, C), in pixels; H and W multiples of `patch`.
    patch: side of a patch, in pixels.
    width: channels of the residual stream; a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads.
    classes: number of logits.
    dropout: share of values dropped in training, 0 <= dropout < 1, after the embedding, on attention weights
        and on each residual branch. Above 0 a run depends on the number of ranks.
    Raises ValueError for a size below 1, a width that heads do not divide, an image that patches do not, or a dropout
    outside its range.
    """
    in_shape = counts("in_shape", in_shape, (2, 3))
    sizes = {"patch": patch, "width": width, "depth": depth, "heads": heads, "classes": classes}
    for name, value in sizes.items():
        require(is_count(value), name, value, "a whole number of at least 1")
    require(in_shape[0] % patch == 0 and in_shape[1] % patch == 0, "in_shape", in_shape,
            f"H and W multiples of patch ({patch})")
    require(width % heads == 0, "width", width, f"a multiple of heads ({heads})")
    require(isinstance(dropout, (int, float)) and 0 <= dropout < 1, "dropout", dropout, "0 <= dropout < 1")
    return ViT(in_shape, patch, width, depth, heads, classes, dropout)


def vit_tiny(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 16, classes: int = 1000,
             dropout: float = 0.0) -> ViT:
    """Build ViT-Ti: 5,717,416 parameters as Ti/16 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=192, depth=12, heads=3, classes=classes, dropout=dropout)


def vit_small(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 16, classes: int = 1000,
              dropout: float = 0.0) -> ViT:
    """Build ViT-S: 22,050,664 parameters as S/16 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=384, depth=12, heads=6, classes=classes, dropout=dropout)


def vit_base(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 16, classes: int = 1000,
             dropout: float = 0.0) -> ViT:
    """Build ViT-B: 86,567,656 parameters as B/16 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=768, depth=12, heads=12, classes=classes, dropout=dropout)


def vit_large(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 16, classes: int = 1000,
              dropout: float = 0.0) -> ViT:
    """Build ViT-L: 304,326,632 parameters as L/16 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=1024, depth=24, heads=16, classes=classes, dropout=dropout)


def vit_huge(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 14, classes: int = 1000,
             dropout: float = 0.0) -> ViT:
    """Build ViT-H: 632,045,800 parameters as H/14 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=1280, depth=32, heads=16, classes=classes, dropout=dropout)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: embed, block_0, ..., head."""
    return [(block.name, block) for block in model.chain]


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 32, 32, 3) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
