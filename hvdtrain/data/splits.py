"""Hold out samples for testing, and generate numbers: from a seed, the same on every machine.

Owns these random streams, numbered from `STREAM` on; those of the sampler count up from 0.
"""

from __future__ import annotations

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.planning.batch.sampler import at_least, epoch_order, random_bits

SPLITS = ("train", "test")
STREAM = 2**63  # first of the random streams used here


def uniform(n: int, seed: int, stream: int) -> np.ndarray:
    """Return float64[n] in [0, 1) of the 53 upper random bits."""
    return (random_bits(n, seed, stream) >> np.uint64(11)) * 2.0**-53


def held_out(labels_n: np.ndarray, test_fraction: float, seed: int) -> np.ndarray:
    """Return bool[n], True for the test samples: of every label the fraction, rounded, but never all."""
    at_least("data.args.seed", seed, 0)
    if not isinstance(test_fraction, (int, float)) or not 0 < test_fraction < 1:
        raise UserError(f"data.args.test_fraction is {test_fraction!r}", "a number above 0 and below 1",
                        "set data.args.test_fraction: 0.2")
    is_test = np.zeros(len(labels_n), bool)
    for rank, label in enumerate(np.unique(labels_n)):
        members = np.flatnonzero(labels_n == label)
        count = int(len(members) * test_fraction + 0.5)
        if len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        is_test[members[epoch_order(len(members), seed, STREAM + rank, shuffle=True)[:count]]] = True
    return is_test
