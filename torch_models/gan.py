"""A generator and a discriminator of points in the plane, trained against each other; twin of `tf_models/gan.py`.

I. Goodfellow et al., "Generative adversarial nets", 2014, with the generator's loss that does not saturate.

Owns: the layers, their names and both losses. Does not own: the optimizer, anything distributed.

Two optimizers in one: an optimizer that updates each element by itself (SGD, Adam) over both networks is two of its
kind, so all that is needed is that one backward gives each network the gradient of its own loss. The discriminator sees
made points cut off from the generator; the generator's loss goes through a discriminator whose weights are constants.
"""
from __future__ import annotations

from collections import OrderedDict
from typing import Sequence

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import softplus

from torch_models import counts, is_count, require
from torch_models.mlp import Dense


class GAN(nn.Module):
    """Two chains of named blocks; noise (B, latent) -> the discriminator's logits (B, 1) of the points made of it."""

    def __init__(self, named_blocks: OrderedDict[str, nn.Module]):
        super().__init__()
        for name, block in named_blocks.items():
            self.add_module(name, block)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return judged(self, made(self, noise))


def build(*, latent: int = 8, hidden: Sequence[int] = (64, 64), out_features: int = 2) -> GAN:
    """Build both networks with torch's default initialisation (fixed by `torch.manual_seed`).

    latent: noise values per sample.
    hidden: units of each hidden layer of either network.
    out_features: values per sample, made or real.
    Raises ValueError for a size below 1.
    """
    require(is_count(latent), "latent", latent, "a whole number of at least 1")
    require(is_count(out_features), "out_features", out_features, "a whole number of at least 1")
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for part, first, last in (("generator", latent, out_features), ("discriminator", out_features, 1)):
        widths = [first, *counts("hidden", hidden)]
        for index, (before, after) in enumerate(zip(widths, widths[1:])):
            named[f"{part}_{index}"] = Dense(before, after, nn.ReLU())
        named[f"{part}_head"] = Dense(widths[-1], last, nn.Identity())
    return GAN(named)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: generator_0, ..., discriminator_head."""
    return list(model.named_children())


def made(model: nn.Module, noise: torch.Tensor) -> torch.Tensor:
    """Run the generator: noise (B, latent) -> points (B, out_features)."""
    for name, block in blocks(model):
        if name.startswith("generator"):
            noise = block(noise)
    return noise


def judged(model: nn.Module, x: torch.Tensor, frozen: bool = False) -> torch.Tensor:
    """Run the discriminator: points -> logits (B, 1), above 0 for real; ``frozen``: its weights are constants."""
    for name, block in blocks(model):
        if name.startswith("discriminator"):
            x = functional_call(block, {n: p.detach() for n, p in block.named_parameters()}, x) if frozen else block(x)
    return x


def losses(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the generator's loss and the discriminator's, each a sum over the batch (real points, noise)."""
    real, noise = batch
    points = made(model, noise)
    of_discriminator = softplus(-judged(model, real)) + softplus(judged(model, points.detach()))
    return softplus(-judged(model, points, frozen=True)).sum(), of_discriminator.sum()


def task(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, int]:
    """Return the sum of both losses, whose gradient is each network's own, and the number of samples."""
    generator, discriminator = losses(model, batch)
    return generator + discriminator, len(batch[0])


def metrics(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, tuple[torch.Tensor, int]]:
    """Return (sum, number of samples) of either loss."""
    generator, discriminator = losses(model, batch)
    return {"generator": (generator, len(batch[0])), "discriminator": (discriminator, len(batch[0]))}


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: points (B, 2) and noise (B, 8), float32 in [0, 1)."""
    rng = np.random.default_rng(0)
    return rng.random((B, 2), dtype=np.float32), rng.random((B, 8), dtype=np.float32)
