"""Keras versions that compute something else are refused."""

import importlib

import keras
import pytest

from hvdtrain.backends import keras as shared
from hvdtrain.core.errors import UserError


def test_an_older_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.13.2")
    with pytest.raises(UserError, match=r"Keras 3\.13\.2 is installed; expected Keras 3\.14"):
        importlib.reload(shared)
    monkeypatch.undo()
    importlib.reload(shared)
