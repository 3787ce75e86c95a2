"""Peak memory of a pipeline's ranks, each in a process of its own: no phase holds the whole model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import config, solo

from hvdtrain import trainer
from hvdtrain.backends.numpy.model import Model
from hvdtrain.checkpoint import stream
from hvdtrain.cluster.machine import memory as heap
from hvdtrain.cluster.machine.memory import host_peak_bytes, resident_bytes
from hvdtrain.config import CheckpointConfig, Named, PipelineConfig
from hvdtrain.engine import loop, session
from hvdtrain.engine.assemble import assemble

# Three ranks show it best: each then holds a third, and of two ranks half.
pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.timeout(120), pytest.mark.usefixtures("few_ranks")]

MIB = 2**20
WIDTH, LAYERS = 1145, 12
WHOLE_MIB = WIDTH * WIDTH * LAYERS * 4 / MIB
"""Of the model's parameters: 60 MiB."""


def settings(out: Path, **changes: Any) -> Any:
    return config(max_steps=2, global_batch=8, optimizer=Named("SGD", {"momentum": 0.9}), metrics=[], lr=1e-4,
                  checkpoint=CheckpointConfig(every_steps=1, at_end=False), out=str(out), **changes)


def model() -> Model:
    return Model((WIDTH,) * (LAYERS + 1), dtype="float32")


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.ones((16, WIDTH), np.float32), np.arange(16)


def held_mib() -> float:
    gc.collect()
    heap.give_back()
    return resident_bytes() / MIB


def peak_mib(work: Callable[[], Any]) -> float:
    """Return the most that this process held while it worked."""
    peak = host_peak_bytes(lambda: [work(), None][1]) / MIB
    if not peak:
        pytest.skip("the kernel does not reset a process' high-water mark")
    return peak


def phases(run: Any, base: float, out: Path, rank: int) -> dict[str, float]:
    """Return each phase's peak in MiB: of training with its saves in all, of the others on top of the start."""
    found = {"training": peak_mib(lambda: loop.fit(run)) - base}
    before = held_mib()
    found["export"] = peak_mib(lambda: trainer.export(run)) - before
    kept = session.find(str(out), None, print) if rank == 0 else None
    before = held_mib()
    found["resume"] = peak_mib(lambda: session.restore(run, kept)) - before
    return found


def test_no_rank_of_a_pipeline_comes_near_the_memory_of_the_whole_model(control, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", MIB)
    out, size = Path(control.bcast(str(tmp_path))), control.size
    alone: dict[str, float] = {}
    if control.rank == 0:
        base = held_mib()
        alone = phases(solo(settings(out / "alone"), model(), data()), base, out / "alone", 0)
        print(f"alone: {alone}")
    alone = control.bcast(alone)
    base = held_mib()
    run = assemble(settings(out / "cut", pipeline=PipelineConfig(size, micro_batches=2)), model(), data())
    rows = control.gather(phases(run, base, out / "cut", control.rank))
    print(rows)
    assert alone["training"] > 3 * WHOLE_MIB, "parameters, gradients and velocities at least"
    for rank, row in enumerate(rows):
        assert row["training"] < (1 / size + 0.2) * alone["training"], (rank, rows, alone)
        assert row["export"] < 0.3 * WHOLE_MIB, (rank, rows)
        assert row["resume"] < (2 / size + 0.3) * WHOLE_MIB, (rank, rows)
