"""The step of a Keras model on PyTorch passes the cases of every backend's step, and resumes a kept checkpoint.

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
    import kept_runs
    from keras_kit import KerasKit
    from small_runs import apart
    from step_cases import *  # noqa: F401,F403
    from torch_tools import TorchKit, one_thread  # noqa: F401

    class KerasOnTorch(KerasKit):
        """Optimizer and schedule that the configuration names are PyTorch's."""

        adam, epsilon, halving = TorchKit.adam, TorchKit.epsilon, TorchKit.halving

    @pytest.fixture(name="kit")
    def keras_kit():
        return KerasOnTorch()

    def test_a_kept_checkpoint_goes_on_as_it_did(tmp_path):
        got, want = kept_runs.resumed("keras_torch", tmp_path / "run")
        assert apart(got, want) <= 1e-6
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
