"""``ring``: points around a circle, with noise for a generator of such points."""

from __future__ import annotations

import numpy as np

from hvdtrain.data.augment.draw import uniform_of
from hvdtrain.data.sources import SPLITS, STREAM, ArraySource, Source, uniform
from hvdtrain.planning.batch.sampler import at_least

SPREAD = 0.05  # standard deviation of a coordinate about its point


def make(split: str, samples: int = 1024, points: int = 8, latent: int = 8, seed: int = 0) -> Source:
    """Return points (n, 2) near ``points`` places on the unit circle, and noise (n, latent) of each epoch; float32."""
    for name, value in {"samples": samples, "points": points, "latent": latent, "seed": seed}.items():
        at_least(f"data.args.{name}", value, 0 if name == "seed" else 1)
    u = uniform(3 * samples, seed, STREAM + 1 + SPLITS.index(split)).reshape(3, samples)
    angles = 2 * np.pi * np.floor(u[0] * points) / points
    radius, turn = SPREAD * np.sqrt(-2 * np.log1p(-u[1])), 2 * np.pi * u[2]  # Box and Muller
    x = np.stack([np.cos(angles) + radius * np.cos(turn), np.sin(angles) + radius * np.sin(turn)], axis=1)
    return Ring(x.astype(np.float32), latent, seed)


class Ring(ArraySource):
    """Points, and noise from (seed, epoch, sample): an `hvdtrain.data.sources.EpochSource`."""

    def __init__(self, x: np.ndarray, latent: int, seed: int) -> None:
        super().__init__((x,))
        self._latent, self._seed = latent, seed

    def fetch(self, indices_n: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.fetch_in(indices_n, 0)

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        noise = 2 * uniform_of(indices_n, self._seed, epoch, "ring noise")(self._latent) - 1
        return self.arrays[0][indices_n], noise.astype(np.float32)
