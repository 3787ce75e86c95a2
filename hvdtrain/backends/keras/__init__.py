"""Parts that Keras models need on each of their backends."""

import keras

from hvdtrain.core.errors import UserError

OLDEST = (3, 14)
"""Oldest Keras that trains right; docs/reference/versions.md has the versions that were run."""

if tuple(map(int, keras.__version__.split(".")[:2])) < OLDEST:
    raise UserError(f"Keras {keras.__version__} is installed", "Keras 3.14 or later: older ones sum activity "
                    "regularizers over the batch, so that micro-batches change the result",
                    "run pip install 'keras>=3.14'")
