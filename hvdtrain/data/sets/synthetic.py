"""``synthetic``: generated samples that can be learnt, of any shape and number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.cluster.machine.memory import host_budget_bytes
from hvdtrain.core.errors import UserError
from hvdtrain.core.units import format_bytes
from hvdtrain.data.sources import SPLITS, STREAM, ArraySource, Source, uniform
from hvdtrain.planning.batch.sampler import at_least, epoch_order

_WORK_BYTES = 24  # bytes that data takes for each number while it is made: its bits and two float64


def make(split: str, samples: int = 1024, shape: Sequence[int] = (8, 8), classes: int = 10,
         vocab: int = 0, seed: int = 0) -> Source:
    """Return ``samples`` generated samples in either split, the same on every machine.

    ``vocab`` 0: x float32 (n, *shape) uniform in [-1, 1), y int64 (n,) the class that a fixed random linear map of x
    ranks first. ``vocab`` > 0: x int64 (n, T) tokens and y int64 (n, T) the tokens that follow, T the product of
    ``shape``; a token's successor is fixed nine times in ten, any token otherwise.
    """
    least_of = {"samples": (samples, 1), "classes": (classes, 2), "vocab": (vocab, 0), "seed": (seed, 0)}
    for name, (value, least) in least_of.items():
        at_least(f"data.args.{name}", value, least)
    extents: list[Any] = list(shape) if isinstance(shape, (tuple, list)) else [shape]
    for extent in extents:
        at_least("data.args.shape (each extent)", extent, 1)
    size = math.prod(extents)
    numbers = 2 * samples * (size + 1) if vocab else samples * (size + classes) + size * classes
    _check_memory(f"{samples} samples of shape {extents} with {vocab or classes} classes", _WORK_BYTES * numbers)
    stream = STREAM + 1 + SPLITS.index(split)
    if vocab:
        return _bigrams(samples, size, vocab, seed, stream)
    x = (2 * uniform(samples * size, seed, stream) - 1).astype(np.float32).reshape(samples, size)
    teacher = (2 * uniform(size * classes, seed, STREAM) - 1).reshape(size, classes)
    y = (x.astype(np.float64) @ teacher).argmax(axis=1).astype(np.int64)
    return ArraySource((x.reshape(samples, *extents), y))


def _check_memory(what: str, needed_bytes: int) -> None:
    """Raise `UserError` where this host has less memory left: ``samples`` may have a digit too many."""
    left_bytes = host_budget_bytes(1)
    if 0 < left_bytes < needed_bytes:
        raise UserError(f"data synthetic of {what} takes {format_bytes(needed_bytes)} during generation",
                        f"at most the {format_bytes(left_bytes)} free on this host",
                        "set data.args.samples, or shape, to less")


def _bigrams(samples: int, length: int, vocab: int, seed: int, stream: int) -> Source:
    successor = epoch_order(vocab, seed, STREAM, shuffle=True)
    noise = uniform(2 * samples * (length + 1), seed, stream).reshape(2, samples, length + 1)
    anything = (noise[0] * vocab).astype(np.int64)
    tokens = anything.copy()
    for t in range(1, length + 1):
        tokens[:, t] = np.where(noise[1, :, t] < 0.1, anything[:, t], successor[tokens[:, t - 1]])
    return ArraySource((tokens[:, :-1], tokens[:, 1:]))
