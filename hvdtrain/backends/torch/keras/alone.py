"""Keeps Keras on PyTorch from importing TensorFlow (law 3).

Keras asks whether a thing that it describes (a model, a loss, also where one is copied) is of TensorFlow, and imports
TensorFlow for the question wherever it is installed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from keras.src.utils import module_utils


@contextlib.contextmanager
def without_tensorflow() -> Iterator[None]:
    """For Keras there is no TensorFlow meanwhile, unless this process has imported it already."""
    lazy = module_utils.tensorflow
    asked = lazy._available
    if "tensorflow" not in sys.modules:
        lazy._available = False
    try:
        yield
    finally:
        lazy._available = asked
