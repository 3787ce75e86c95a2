"""Saves in the background over MPI: whole runs of each framework, both layouts, resumed by other numbers of ranks."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from small_runs import bits, config, fitted, make_model, samples

from hvdtrain.checkpoint import adapters, files, read_snapshot
from hvdtrain.checkpoint.savers import BackgroundSaver, InlineSaver
from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.saving import Saving

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
DATA = samples(48)


class Slow(Callback):
    """Notes at the end of each step whether this rank's part of a save is under way."""

    where = "all"

    def __init__(self) -> None:
        self.busy = 0

    def step_end(self, run):
        self.busy += run.saver is not None and run.saver.busy()


def state_of(out, step):
    """Return the whole state by group and place, and the manifest's facts without the configuration."""
    snapshot = read_snapshot(out / f"checkpoints/step-{step:08d}")
    facts = {key: value for key, value in snapshot.meta.items() if key not in ("config", "layout")}
    arrays = {group: [a.tobytes() for _, a in sorted(named.items())] for group, named in snapshot.tensors.items()}
    return arrays, facts


@pytest.fixture
def slow_disk(monkeypatch):
    """Slow the disk down, so that training runs while a file is written."""
    write, pause = files.write_durably, threading.Event()
    monkeypatch.setattr(files, "write_durably", lambda path, pieces: pause.wait(0.02) or write(path, pieces))
    monkeypatch.setattr(adapters, "LEAST_CUT_BYTES", 64)


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.world_size(3)),
                                       pytest.param("tensorflow", marks=pytest.mark.world_size(2))])
def test_saves_beside_training_have_the_bits_of_saves_that_are_waited_for(control, tmp_path, monkeypatch, slow_disk,
                                                                          framework):
    out = control.bcast(tmp_path)
    settings = config(global_batch=12, max_steps=8, optimizer=Named("Adam"))
    busy = {}
    for name, layout, saver in (("beside", "gathered", BackgroundSaver), ("shards", "sharded", BackgroundSaver),
                                ("waited", "gathered", InlineSaver)):
        monkeypatch.setattr("hvdtrain.engine.saving.BackgroundSaver", saver)
        keys = CheckpointConfig(every_steps=2, keep=9, layout=layout)
        run = assemble(replace(settings, out=str(out / name), checkpoint=keys), make_model(framework), DATA)
        watch = Slow()
        run.callbacks[:0] = [watch]
        fitted(run)
        assert isinstance(run.saver, Saving) and run.saver.spent.saves == 5
        busy[name] = control.gather(watch.busy)[0]
    assert busy["beside"] > 0 and busy["shards"] > 0 and busy["waited"] == 0
    if control.rank == 0:
        for step in (2, 4, 6, 8):
            beside, shards, waited = (state_of(out / name, step) for name in ("beside", "shards", "waited"))
            assert beside == waited and shards == waited
    control.barrier("compared")
    again = replace(settings, out=str(out / "shards"), resume="auto", max_steps=10, checkpoint=CheckpointConfig())
    run = fitted(assemble(again, make_model(framework, seed=3), DATA))
    assert run.state.cursor.step == 10 and len(set(control.gather(bits(run)))) == 1


def test_a_failed_write_is_told_on_every_rank_at_the_next_vote(control, tmp_path, monkeypatch):
    out = control.bcast(tmp_path)

    def full(path, pieces):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_durably", full)
    settings = config(global_batch=12, max_steps=9, out=str(out / "run"),
                      checkpoint=CheckpointConfig(every_steps=4, at_end=False))
    run = fitted(assemble(settings, make_model("numpy"), DATA))
    assert any("step 4: checkpoint not written ([Errno 28] No space left on device)" in note for note in run.notes)
    assert "2 checkpoints could not be written, the last 2 in a row" in run.notes
    assert np.isfinite(run.state.loss)
