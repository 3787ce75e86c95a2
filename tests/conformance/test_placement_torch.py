"""Memory that this process may take of a GPU, by a made-up device, and needs of deterministic kernels."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hvdtrain.backends.torch import placement  # noqa: E402

GIB = 1 << 30
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Return a device of 80 GiB, 60 of them free, of which this process has reserved 10 and uses 8."""
    found = SimpleNamespace(name="made up", major=8, minor=0, total_memory=80 * GIB)
    for name, value in {"is_available": True, "mem_get_info": (60 * GIB, 80 * GIB), "memory_reserved": 10 * GIB,
                        "memory_allocated": 8 * GIB, "get_device_properties": found,
                        "get_per_process_memory_fraction": 1.0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value, raising=False)
    return monkeypatch


@pytest.mark.parametrize("fraction, left, known", [(1.0, 60, 80), (0.5, 30, 40), (0.125, 0, 10), (0.0625, 0, 5)])
def test_a_part_of_a_gpu_is_what_counts(gpu, fraction, left, known):
    gpu.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    assert placement.memory_bytes(GPU) == left * GIB
    assert placement.free_bytes(GPU) == (left + 2) * GIB  # what is reserved and not used can be taken too
    assert placement.device_facts().memory_bytes == known * GIB


def test_a_pytorch_that_does_not_tell_the_part_has_all(gpu):
    gpu.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert (placement.memory_bytes(GPU), placement.device_facts().memory_bytes) == (60 * GIB, 80 * GIB)


@pytest.mark.parametrize("given, wanted", [(None, ":4096:8"), (":16:8", ":16:8")])
def test_deterministic_kernels_have_the_workspace_that_products_on_gpus_need(monkeypatch, given, wanted):
    name, threads = "CUBLAS_WORKSPACE_CONFIG", torch.get_num_threads()
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    try:
        placement.setup(threads, deterministic=True)
        assert os.environ[name] == wanted and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
