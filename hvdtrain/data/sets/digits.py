"""``digits``: scikit-learn's handwritten digits, read from the file that it ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from hvdtrain.core.resolve import not_installed
from hvdtrain.data.sources import ArraySource, Source, chosen

SHAPE = (1797, 65)


def make(split: str, test_fraction: float = 0.2, seed: int = 0) -> Source:
    """Return scikit-learn's 1,797 handwritten digits: x float32 (n, 8, 8) in [0, 1], y int64 (n,) of 0 to 9.

    The test split takes ``test_fraction`` of every class, chosen by ``seed``, the same with every library version.
    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
    """
    raw = table()
    x, y = (raw[:, :-1].reshape(-1, 8, 8) / 16.0).astype(np.float32), raw[:, -1].astype(np.int64)
    taken = chosen(y, test_fraction, seed, split)
    return ArraySource((x[taken], y[taken]))


def table() -> np.ndarray:
    """Return float64 (1797, 65): 8 x 8 pixels of 0 to 16, row by row, and the digit."""
    try:
        found = importlib.util.find_spec("sklearn")
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise not_installed("data: digits", "scikit-learn", "data")
    for folder in found.submodule_search_locations or ():
        try:
            rows = np.loadtxt(Path(folder, "datasets", "data", "digits.csv.gz"), delimiter=",")
        except (OSError, ValueError):
            continue
        if rows.shape == SHAPE:
            return rows
    from sklearn.datasets import load_digits  # a version that keeps them elsewhere

    raw = load_digits()
    return np.column_stack([raw.data, raw.target])
