"""Notes about a run's checkpoints before its first step: interval, size, and free disk space."""

import pytest
from small_runs import FRAMEWORKS, config, fitted, make_model, samples, solo, weights

from hvdtrain.checkpoint import inspect
from hvdtrain.checkpoint import savers as disk
from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.core.units import format_bytes

DATA = samples(40)


@pytest.mark.parametrize("keys, words", [
    ({}, "after 60 s, then as often as keeps their cost below 3 % of the time, at the end"),
    ({"every": "off"}, "at the end"),
    ({"every_steps": 5, "every_s": 2.5, "at_end": False}, "every 5 steps, every 2.5 s"),
    ({"every": "off", "at_end": False}, "")])
def test_when_a_run_is_saved_in_words(keys, words):
    assert disk.often(CheckpointConfig(**keys)) == words


def test_room_is_for_one_more_than_are_kept():
    settings = CheckpointConfig(keep=2, every_steps=9)
    assert disk.line(settings, 10 * 2**20, 2**31) == (
        "checkpoints: every 9 steps, at the end; about 10.0 MiB each, the newest 2 are kept, at most 30.0 MiB; 2.00 "
        "GiB free")
    assert disk.warning(settings, 100, 300) == disk.warning(settings, 100, None) == ""
    assert disk.warning(settings, 100, 299).startswith("checkpoints may not fit: 300 B for 2 and one more")


@pytest.mark.parametrize("framework, optimizer", [("numpy", "SGD"), *((f, "Adam") for f in FRAMEWORKS),
                                                  ("torch", "SGD")])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_size_that_is_foretold_is_the_size_that_is_written(tmp_path, capsys, framework, optimizer, ema):
    settings = config(out=str(tmp_path), max_steps=2, global_batch=8, optimizer=Named(optimizer), progress="plain",
                      checkpoint=CheckpointConfig(), ema=ema)
    run = solo(settings, make_model(framework), DATA)
    own = sum(array.nbytes for array in run.rank_state().values())
    foretold = run.parts.state.state_bytes() + own + (sum(a.nbytes for a in weights(run)) if ema else 0)
    fitted(run)
    written = sum(entry.size_bytes for entry in inspect(tmp_path / "checkpoints/step-00000002").files.values())
    assert foretold <= written < foretold + 6000  # names and shapes
    assert f"about {format_bytes(foretold)} each, the newest 3 are kept" in capsys.readouterr().out


def test_a_disk_without_room_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda out: 10_000)
    run = fitted(solo(config(out=str(tmp_path), max_steps=2, global_batch=8, checkpoint=CheckpointConfig()),
                      make_model("numpy"), DATA))
    assert len([note for note in run.notes if note.startswith("checkpoints may not fit: ")]) == 1
