"""Keras' own random generator, which serves ``keras.random`` calls without a seed, put back as it was.

Owns that one; the seeded generators of a model's layers are variables of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
from keras.src.backend.common import global_state

_NAME = "global_seed_generator"


@contextlib.contextmanager
def generator_kept() -> Iterator[None]:
    """Within it Keras may draw and make its generator; afterwards it is as before, or to be made still."""
    own = global_state.get_global_attribute(_NAME)
    before = None if own is None else np.array(keras.ops.convert_to_numpy(own.state))
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAME, own)
        if own is not None:
            own.state.assign(before)
