"""PyTorch models whose rank runs out of memory: what a repeated step draws and remembers, and what must come of cases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from shortages import DATA, Injected, Setting, drawn, wrong  # noqa: E402
from small_runs import CLASSES, FEATURES, HIDDEN, bits, fitted, lockstep  # noqa: E402
from split_models import deep  # noqa: E402

from hvdtrain import backends  # noqa: E402
from hvdtrain.backends.torch import placement  # noqa: E402
from hvdtrain.cluster.machine import memory  # noqa: E402
from hvdtrain.config import DataParallelConfig  # noqa: E402
from hvdtrain.core import rng  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

nn = torch.nn


class Drawing(nn.Module):
    """Adds noise of Python's and numpy's generators: what a repeated step must draw alike."""

    def forward(self, x: Any) -> Any:
        import random

        import numpy as np

        return x * (1 + 0.01 * random.random() + 0.01 * float(np.random.standard_normal()))


def model(*more: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), *more, nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def trained(make: Any, fails: range, place: str = "backward", size: int = 1, **changes: Any) -> list[Any]:
    """Return runs by rank; rank 0 of them fails."""
    def work(run: Any) -> Any:
        Injected(place, fails).into(run, run.control.rank == 0)
        torch.manual_seed(1)
        rng.seed(1, 0)
        return fitted(run)

    settings = replace(Setting("torch", (1,) * size, 2).config(), **changes)
    return lockstep(size, settings, lambda r: make(), DATA, work)


@pytest.mark.parametrize("remat", ["off", "every:1"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_masks_noise_and_statistics_are_those_of_an_undisturbed_run(place, remat):
    """Also where memory lacks while a block is computed again."""
    def make() -> Any:
        return model(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5), Drawing())

    (plain,) = trained(make, range(0))
    for at in (5, 7):
        (run,) = trained(make, range(at, at + 1), place, remat=remat)
        assert len(run.shortages) == 1 and bits(run) == bits(plain)
        assert run.state.metrics == plain.state.metrics  # of BatchNorm's statistics
    (smaller,) = trained(make, range(5, 7), place, remat=remat)
    said = [note for note in smaller.notes if note.startswith("the gradient depends on the micro-batches")]
    assert len(said) == 1 and "BatchNorm" in said[0] and "ropout" in said[0]


@pytest.mark.parametrize("changes", [{"model_parallel": 2}, {"precision": "fp16"},
                                     {"model_parallel": 2, "data_parallel": DataParallelConfig("zero", 2)}])
def test_split_models_and_scaled_losses_repeat_to_the_bit(changes, monkeypatch):
    """A repeat leaves the loss scale as it is."""
    monkeypatch.setattr(placement, "devices", lambda n: [torch.device("cpu")] * n)
    plain, runs = (trained(deep, fails, size=2, **changes) for fails in (range(0), range(6, 7)))
    assert [len(run.shortages) for run in runs] == [1, 1] and {bits(run) for run in runs} == {bits(plain[0])}
    assert [run.parts.scale.state() for run in runs] == [run.parts.scale.state() for run in plain]


def test_statistics_that_one_sample_does_not_have_end_the_run_on_all_ranks():
    def work(run: Any) -> str:
        Injected("forward", range(0, 1000)).into(run, run.control.rank == 0)
        with pytest.raises(UserError) as error:
            fitted(run)
        return str(error.value)

    settings = replace(Setting("torch", (1, 1)).config(), global_batch=12)
    torch.manual_seed(0)
    said = lockstep(2, settings, lambda r: model(nn.BatchNorm1d(HIDDEN)), DATA, work)
    assert said[0] == said[1] and "rank 0 is out of memory in training with a micro-batch of" in said[0]


def test_the_last_words_tell_what_would_save_how_many_bytes():
    def make() -> Any:
        return nn.Sequential(nn.Linear(FEATURES, 2000), nn.Tanh(), nn.Linear(2000, 2000), nn.Linear(2000, CLASSES))

    with pytest.raises(UserError, match=r"memory for the model and one sample.* zero .*saves about [\d.]+ [KMG]iB"):
        trained(make, range(0, 1000), size=2, optimizer=replace(Setting("torch", (1,)).config().optimizer, name="Adam"))


def test_ranks_that_wait_within_a_micro_batch_end_with_one_message():
    with pytest.raises(UserError, match="out of memory in training .* with sync_batchnorm layers wait"):
        trained(lambda: model(nn.BatchNorm1d(HIDDEN)), range(3, 4), size=2, sync_batchnorm=True)


def test_words_of_libraries_that_mean_a_lack_of_memory():
    out = backends.load("torch").out_of_memory
    for words in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
                  "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in",
                  "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
                  "GET was unable to find an engine to execute this computation", "HIP out of memory. Tried",
                  "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you"):
        assert out(RuntimeError(words)), words
    for words in ("NCCL error: unhandled cuda error, 'out of memory'", "CUDA error: device-side assert triggered",
                  "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"):
        assert not out(RuntimeError(words)), words
    assert not out(ValueError("out of memory"))
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert out(error.value)


def test_cases_end_as_undisturbed_runs():
    """Some of the campaign of `tests/fuzz/shortages.py`."""
    found = {case: said for case in drawn(10, 15, ("torch", "numpy")) if (said := wrong(case))}
    assert not found


class Holds(nn.Module):
    """Runs out of memory, as PyTorch's allocator of the CPU does, in training with more than ``most`` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Any) -> Any:
        if self.training and len(x) > self.most:
            torch.empty(2**60, dtype=torch.uint8)
        return x


@pytest.mark.parametrize("limited, changes", [(False, {}), (False, {"micro_batch": "auto"}), (True, {})],
                         ids=["plain", "auto", "a host with limits"])
def test_what_is_tried_before_the_first_step_may_run_out_of_memory(limited, changes, monkeypatch):
    monkeypatch.setattr(memory, "limited", lambda: limited)
    trained(lambda: model(Holds(1)), range(0), **changes)
    with pytest.raises(UserError, match="rank 0 is out of memory in training with a micro-batch of 1 "):
        trained(lambda: model(Holds(0)), range(0), **changes)
