"""Errors that a backend takes for a lack of memory, the memory use it reports, and that it offers no module by mistake.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from hvdtrain import backends


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_backends_tell_out_of_memory_from_other_errors(framework):
    if framework != "numpy":
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    backend = backends.load(framework)
    assert backend.out_of_memory(MemoryError()) and not backend.out_of_memory(ValueError("shapes"))
    if framework == "torch":
        import torch

        assert backend.out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
        assert not backend.out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    if framework == "tensorflow":
        import tensorflow as tf

        assert backend.out_of_memory(tf.errors.ResourceExhaustedError(None, None, "OOM"))
    calls = []
    assert backend.peak_bytes(lambda: calls.append(1)) == 0 and calls == [1]
    # A module of the same name takes the place of a function that was imported before it.
    assert not [name for name in backend.__all__ if isinstance(getattr(backend, name), ModuleType)]
