"""The random generators of Python and numpy as arrays, so that a run can be resumed bit by bit.

Owns the two that every run has; a backend adds its framework's.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np


def capture() -> dict[str, np.ndarray]:
    """State of ``random`` and of numpy's global generator."""
    version, words, gauss = random.getstate()
    _, key, pos, has_gauss, cached = np.random.get_state()
    return {
        "python.words": np.array(words, dtype=np.uint32),
        "python.rest": np.array([version, np.nan if gauss is None else gauss], dtype=np.float64),
        "numpy.key": np.asarray(key, dtype=np.uint32),
        "numpy.rest": np.array([pos, has_gauss, cached], dtype=np.float64),
    }


def restore(state: dict[str, np.ndarray]) -> None:
    """Undo `capture`."""
    version, gauss = state["python.rest"]
    words = tuple(int(w) for w in state["python.words"])
    random.setstate((int(version), words, None if np.isnan(gauss) else float(gauss)))
    pos, has_gauss, cached = state["numpy.rest"]
    np.random.set_state(("MT19937", state["numpy.key"], int(pos), int(has_gauss), float(cached)))


def mark() -> Callable[[], None]:
    """Note where both generators are; the function returned puts them back there.

    Cheaper than `capture`, for every step.
    """
    own, numpys = random.getstate(), np.random.get_state(legacy=False)

    def back() -> None:
        random.setstate(own)
        np.random.set_state(numpys)
    return back


def seed(seed: int, rank: int) -> None:
    """Give this rank its own streams."""
    random.seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
