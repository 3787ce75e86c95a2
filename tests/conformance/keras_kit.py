"""Keras' half of the cases of every backend's step, for the Keras backend of this process.

Imports Keras: a test asks for it first (pytest.importorskip).
"""

from __future__ import annotations

import random

import keras
import numpy as np
from step_kit import Kit, given

from hvdtrain.config import ScheduleConfig


class KerasKit(Kit):
    """``framework``: what Keras computes with."""

    adam = "adam, epsilon hat"
    halving = ScheduleConfig("exponentialdecay", {"decay_steps": 1, "decay_rate": 0.5})

    def __init__(self) -> None:
        self.framework = keras.config.backend()

    def model(self, start=3, hidden=16, noisy=False):
        random.seed(start)  # from which Keras takes the seeds of its layers
        layers = keras.layers
        between = [layers.BatchNormalization(name="norm"), layers.Dropout(0.3, name="drop")] if noisy else []
        model = keras.Sequential([keras.Input((12,)), layers.Dense(hidden, activation="relu", name="hidden"), *between,
                                  layers.Dense(5, name="out")], name="net")
        for own, array in zip(self._own(model), given(start, hidden)):
            own.assign(array)
        return model

    def chain(self):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(units, activation="tanh", name=name)
                  for name, units in (("one", 16), ("two", 14), ("three", 12))]
        return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(5, name="four")])

    def plain(self, model):
        return [np.array(keras.ops.convert_to_numpy(v)) for v in self._own(model)]

    def statistics(self, model):
        norm = model.get_layer("norm")
        return [np.array(keras.ops.convert_to_numpy(v)) for v in (norm.moving_mean, norm.moving_variance)]

    @staticmethod
    def _own(model):
        return [*model.get_layer("hidden").weights, *model.get_layer("out").weights]
