"""Draw random numbers of single samples from (seed, epoch, sample number, name) alone, and check augmentations' values.

Law 2 rests on these numbers for augmented data: no sample depends on the ranks or on the other samples of its batch.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.ledger import GOLDEN, mixed

Uniform = Callable[[int], np.ndarray]
"""From k to float64 (n, k) in [0, 1): the first k random numbers of each of n samples, the same at every call."""

ROUNDS = 32  # tries of a rejection method, of which each succeeds 19 times in 20


def uniform_of(numbers_n: np.ndarray, seed: int, epoch: int, name: str, first: int = 0) -> Uniform:
    """Return a generator for the samples int64[n] ``numbers_n``; each ``name`` has numbers of its own.

    Each sample has a SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014) that starts at its number, scrambled
    under a key of (seed, epoch, name). ``first``: index in the sequence to begin with.
    """
    text = f"{seed} {epoch} {name}".encode()
    key = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u8").astype(np.uint64)
    starts_n = mixed(np.asarray(numbers_n, np.int64).view(np.uint64) ^ key)

    def uniform(k: int) -> np.ndarray:
        steps_k = np.arange(first + 1, first + k + 1, dtype=np.uint64) * GOLDEN
        return (mixed(starts_n[:, None] + steps_k) >> np.uint64(11)) * 2.0**-53
    return uniform


def beta(uniform: Uniform, alpha: float) -> np.ndarray:
    """Return float64[n] of Beta(alpha, alpha) as X / (X + Y) of Gamma variables, by logarithms for a small alpha."""
    log_x, log_y = (_log_gamma_variable(uniform, alpha, which) for which in (0, 1))
    return 1 / (1 + np.exp(np.clip(log_y - log_x, -700, 700)))


def _log_gamma_variable(uniform: Uniform, alpha: float, which: int) -> np.ndarray:
    """Return float64[n]: the logarithm of Gamma(alpha) variable ``which`` (Marsaglia, Tsang, TOMS 2000)."""
    d = alpha + 1 - 1 / 3
    boost_n = np.log1p(-uniform(2)[:, which]) / alpha
    cubes_n, open_n = np.ones(len(boost_n)), np.ones(len(boost_n), bool)
    for at in range(ROUNDS):
        begin = 2 + 6 * at + 3 * which
        u, v, w = uniform(begin + 3)[:, begin:].T
        normal_n = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)  # Box and Muller
        tried_n = (1 + normal_n / np.sqrt(9 * d)) ** 3
        with np.errstate(invalid="ignore", divide="ignore"):
            good_n = (tried_n > 0) & (np.log1p(-w) < normal_n**2 / 2 + d * (1 - tried_n + np.log(tried_n)))
        cubes_n = np.where(open_n & good_n, tried_n, cubes_n)
        open_n &= ~good_n
        if not open_n.any():
            break
    return np.log(d * cubes_n) + boost_n


def whole(name: str, value: Any, of_what: str) -> None:
    """Raise `UserError` unless ``value`` is a whole number of 0 (off) or more."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise UserError(f"data.augment.{name} is {value!r}", f"a whole number of {of_what}, 0 or more",
                        f"correct data.augment.{name}")


def smaller_than(name: str, value: int, limit: int, x: np.ndarray) -> None:
    """Raise `UserError` unless ``value`` is below ``limit``, so that something is left of pictures ``x``."""
    if value >= limit:
        raise UserError(f"data.augment.{name} is {value}, and the images have {x.shape[1]} x {x.shape[2]} pixels",
                        f"less than {limit}, so that some pixels are left", f"correct data.augment.{name}")


def share(name: str, value: Any) -> None:
    """Raise `UserError` unless ``value`` is a probability."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise UserError(f"data.augment.{name} is {value!r}", "a probability from 0 to 1",
                        f"correct data.augment.{name}")
