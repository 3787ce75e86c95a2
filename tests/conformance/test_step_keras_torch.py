"""The step of a Keras model on PyTorch passes the cases that every backend's step must pass.

Keras' backend is fixed when it is imported, and this process may have it on TensorFlow: a child runs this file.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = os.environ.get("KERAS_BACKEND") == "torch"

if HERE:
    from keras_kit import KerasKit
    from step_cases import *  # noqa: F401,F403
    from torch_tools import TorchKit, one_thread  # noqa: F401

    class KerasOnTorch(KerasKit):
        """Optimizer and schedule that the configuration names are PyTorch's."""

        adam, epsilon, halving = TorchKit.adam, TorchKit.epsilon, TorchKit.halving

    @pytest.fixture(name="kit")
    def keras_kit():
        return KerasOnTorch()
else:
    def test_the_cases_pass_in_a_process_whose_keras_computes_with_torch():
        for name in ("torch", "keras"):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed")
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(Path(__file__))]
        done = subprocess.run(command, env={**os.environ, "KERAS_BACKEND": "torch"}, capture_output=True, text=True,
                              timeout=100)
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
