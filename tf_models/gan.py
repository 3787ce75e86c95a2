"""A generator and a discriminator of points in the plane, trained against each other; twin of `torch_models/gan.py`.

I. Goodfellow et al., "Generative adversarial nets", 2014, with the generator's loss that does not saturate.

Owns: the layers, their names and both losses. Does not own: the optimizer, anything distributed.

Two optimizers in one: an optimizer that updates each element by itself (SGD, Adam) over both networks is two of its
kind, so all that is needed is that one backward gives each network the gradient of its own loss. The discriminator sees
made points cut off from the generator; the generator's loss goes through a discriminator whose weights are constants.
"""
from __future__ import annotations

from typing import Any, Sequence

import keras
import numpy as np
from keras import ops

from tf_models import counts, is_count, require
from tf_models.mlp import Dense


@keras.saving.register_keras_serializable(package="tf_models")
class GAN(keras.Model):
    """Two chains of named blocks; noise (B, latent) -> the discriminator's logits (B, 1) of the points made of it."""

    def __init__(self, latent: int, hidden: Sequence[int], out_features: int, **kwargs: Any):
        super().__init__(**{"name": "gan", **kwargs})
        self.settings = {"latent": latent, "hidden": list(hidden), "out_features": out_features}
        self.chain = []
        for part, first, last in (("generator", latent, out_features), ("discriminator", out_features, 1)):
            widths = [first, *hidden]
            self.chain += [Dense(*sizes, ops.relu, name=f"{part}_{index}")
                           for index, sizes in enumerate(zip(widths, widths[1:]))]
            self.chain.append(Dense(widths[-1], last, name=f"{part}_head"))
        self(keras.Input((latent,)))  # creates the variables, without running anything

    def call(self, noise, training=None):
        return judged(self, made(self, noise))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


def build(*, latent: int = 8, hidden: Sequence[int] = (64, 64), out_features: int = 2) -> GAN:
    """Build both networks with Keras' default initialisation (fixed by `keras.utils.set_random_seed`).

    latent: noise values per sample.
    hidden: units of each hidden layer of either network.
    out_features: values per sample, made or real.
    Raises ValueError for a size below 1.
    """
    require(is_count(latent), "latent", latent, "a whole number of at least 1")
    require(is_count(out_features), "out_features", out_features, "a whole number of at least 1")
    return GAN(latent, counts("hidden", hidden), out_features)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: generator_0, ..., discriminator_head."""
    return [(block.name, block) for block in model.chain]


def made(model: keras.Model, noise):
    """Run the generator: noise (B, latent) -> points (B, out_features)."""
    for name, block in blocks(model):
        if name.startswith("generator"):
            noise = block(noise)
    return noise


def judged(model: keras.Model, x, frozen: bool = False):
    """Run the discriminator: points -> logits (B, 1), above 0 for real; ``frozen``: its weights are constants."""
    for name, block in blocks(model):
        if name.startswith("discriminator"):
            if frozen:
                constants = [ops.stop_gradient(v) for v in block.trainable_variables]
                x, _ = block.stateless_call(constants, block.non_trainable_variables, x)
            else:
                x = block(x)
    return x


def losses(model: keras.Model, batch):
    """Return the generator's loss and the discriminator's, each a sum over the batch (real points, noise)."""
    real, noise = batch
    points = made(model, noise)
    of_discriminator = ops.softplus(-judged(model, real)) + ops.softplus(judged(model, ops.stop_gradient(points)))
    return ops.sum(ops.softplus(-judged(model, points, frozen=True))), ops.sum(of_discriminator)


def task(model: keras.Model, batch):
    """Return the sum of both losses, whose gradient is each network's own, and the number of samples."""
    generator, discriminator = losses(model, batch)
    return generator + discriminator, ops.shape(batch[0])[0]


def metrics(model: keras.Model, batch):
    """Return (sum, number of samples) of either loss."""
    generator, discriminator = losses(model, batch)
    n = ops.shape(batch[0])[0]
    return {"generator": (generator, n), "discriminator": (discriminator, n)}


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: points (B, 2) and noise (B, 8), float32 in [0, 1)."""
    rng = np.random.default_rng(0)
    return rng.random((B, 2), dtype=np.float32), rng.random((B, 8), dtype=np.float32)
