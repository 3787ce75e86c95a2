"""Checkpoints, resume and export of a model that is cut over ranks, in the reference backend on ranks as threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import CLASSES, FEATURES, config, fitted, lockstep, samples

from hvdtrain import trainer
from hvdtrain.backends import numpy as numpy_backend
from hvdtrain.checkpoint import read_snapshot, stream, weights
from hvdtrain.cluster.devices import cpu_facts
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import CheckpointConfig, Config, DataParallelConfig, Named, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop, session, summary
from hvdtrain.engine.assemble import assemble

SIZES = (FEATURES, 16, 14, 12, CLASSES)
DATA = samples(100), samples(30, 1)
MOMENTUM = Named("SGD", {"momentum": 0.9})
STEPS, HALF = 12, 7

SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "two stages": (2, {"pipeline": PipelineConfig(2)}),
    "three stages": (3, {"pipeline": PipelineConfig(3)}),
    "interleaved": (2, {"pipeline": PipelineConfig(2, "interleaved", chunks=2)}),
    "two by two": (4, {"pipeline": PipelineConfig(2)}),
    "one and two": (3, {"pipeline": PipelineConfig(depths=[1, 2])}),
    "two by two, zero": (4, {"pipeline": PipelineConfig(2), "data_parallel": DataParallelConfig("zero", stage=1)}),
}


def settings(out: Path, **changes: Any) -> Config:
    """Twelve steps; the seventh is in the middle of an epoch."""
    kept = changes.pop("checkpoint", CheckpointConfig(every="off"))
    usual = {"max_steps": STEPS, "global_batch": 24, "lr": 0.05, "optimizer": MOMENTUM}
    return config(**{**usual, "checkpoint": kept, "out": str(out), **changes})


def model(rank: int = 0) -> Any:
    from hvdtrain.backends.numpy.model import Model

    return Model(SIZES, 3)


def trained(shape: str, out: Path, **changes: Any) -> list[Any]:
    """Return the runs of all ranks after their fit."""
    size, keys = SHAPES[shape]
    return lockstep(size, settings(out, **{**keys, **changes}), model, DATA, fitted)


def kept(out: Path, step: int) -> Any:
    """Return a run's checkpoint."""
    return read_snapshot(out / "checkpoints" / f"step-{step:08d}")


def apart(got: Any, want: Any) -> float:
    """Return the largest difference between two checkpoints' arrays, which have to have one set of names and shapes."""
    worst = 0.0
    for group in ("model", "optimizer"):
        assert list(got.tensors[group]) == list(want.tensors[group])
        for name, array in want.tensors[group].items():
            assert got.tensors[group][name].shape == array.shape
            assert np.isfinite(got.tensors[group][name]).all()
            worst = max(worst, float(np.abs(got.tensors[group][name] - array).max()))
    return worst


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run in one process, with a checkpoint in the middle of an epoch and one at its end."""
    out = tmp_path_factory.mktemp("whole") / "run"
    trained("whole", out, checkpoint=CheckpointConfig(every_steps=HALF))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gathered", "sharded"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "whole"])
def test_checkpoint_of_a_pipeline_is_that_of_one_process_and_any_shape_goes_on_with_it(
        shape: str, layout: str, whole: Path, tmp_path: Path) -> None:
    saved = CheckpointConfig(every_steps=HALF, layout=layout)
    trained(shape, tmp_path / "run", checkpoint=saved, max_steps=HALF)
    assert apart(kept(tmp_path / "run", HALF), kept(whole, HALF)) < 1e-12
    other = {"two stages": "three stages", "three stages": "one and two", "one and two": "two by two, zero",
             "interleaved": "two by two", "two by two": "two stages", "two by two, zero": "interleaved"}[shape]
    for again in (other, "whole"):
        runs = trained(again, tmp_path / again, resume=str(tmp_path / "run"))
        assert runs[0].state.cursor.step == STEPS
        assert any("resumed a run of" in note and "ranks on" not in note for note in runs[0].notes)
        assert apart(kept(tmp_path / again, STEPS), kept(whole, STEPS)) < 1e-12


@pytest.mark.parametrize("shape", ["three stages", "two by two, zero"])
def test_checkpoint_of_one_process_goes_on_in_a_pipeline(shape: str, whole: Path, tmp_path: Path) -> None:
    at = str(whole / "checkpoints" / f"step-{HALF:08d}")
    trained(shape, tmp_path / "run", resume=at)
    assert apart(kept(tmp_path / "run", STEPS), kept(whole, STEPS)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gathered", "sharded"])
@pytest.mark.parametrize("shape", ["three stages", "two by two, zero"])
def test_run_that_goes_on_in_its_own_shape_has_the_bits_of_one_that_did_not_end(
        shape: str, layout: str, tmp_path: Path) -> None:
    saved = CheckpointConfig(every_steps=HALF, layout=layout)
    trained(shape, tmp_path / "through", checkpoint=saved)
    runs = trained(shape, tmp_path / "again", checkpoint=saved,
                   resume=str(tmp_path / "through" / "checkpoints" / f"step-{HALF:08d}"))
    assert not any("anew" in note for note in runs[0].notes)
    assert apart(kept(tmp_path / "again", STEPS), kept(tmp_path / "through", STEPS)) == 0


def test_run_keeps_the_cut_that_it_is_gone_on_with_and_says_where_it_cannot(tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    def layout(name: str, **changes: Any) -> tuple[Any, list[str]]:
        run = trained("two stages", tmp_path / name, **changes)[0]
        return run.parts.layout, run.notes

    odd = PipelineConfig(2, cut=["layer1"])
    first, _ = layout("first", pipeline=odd, max_steps=HALF)
    again, notes = layout("again", resume=str(tmp_path / "first"))
    assert again.starts == first.starts == ((0, 1),) and not any("anew" in note for note in notes)
    auto, _ = layout("first", resume="auto", max_steps=HALF + 1)
    assert auto.starts == ((0, 1),)
    other, notes = layout("other", resume=str(tmp_path / "again"), pipeline=PipelineConfig(2, cut=["layer3"]))
    assert other.starts == ((0, 3),)
    assert any("on 2 in one pipeline with another partition: random generators restart" in note for note in notes)
    whole, _ = layout("whole")
    assert whole.starts != first.starts, "else this test shows nothing"
    monkeypatch.setattr(numpy_backend, "device_facts", lambda: replace(cpu_facts(), name="another"))
    moved, _ = layout("moved", resume=str(tmp_path / "first"))
    assert moved.starts == whole.starts


@pytest.mark.parametrize("shape", ["whole", "three stages", "two by two"])
def test_final_weights_are_one_file_that_comes_in_pieces(shape: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 512)
    files: list[list[str]] = []

    def work(run: Any) -> Any:
        run = fitted(run)
        files.append(trainer.export(run))
        files.append(trainer.export(run))  # over the one that is there
        return run

    size, keys = SHAPES[shape]
    lockstep(size, settings(tmp_path / "run", **keys), model, DATA, work)
    assert files == [["model.safetensors"]] * 2 * size
    got, want = load_file(tmp_path / "run" / "model" / "model.safetensors"), kept(tmp_path / "run", STEPS)
    assert sorted(got) == sorted(want.tensors["model"])
    assert all((got[name] == array).all() for name, array in want.tensors["model"].items())


def test_final_weights_that_find_no_room_end_every_rank_in_words(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    def full(plan: Any, blocks: Any, target: Path) -> None:
        next(iter(blocks))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "put", full)
    monkeypatch.setattr("hvdtrain.engine.final_files.WAITS_S", ())
    said: list[str] = []

    def work(run: Any) -> None:
        fitted(run)
        with pytest.raises(UserError, match="the final model could not be written to .*No space left") as error:
            trainer.export(run)
        said.append(str(error.value))

    lockstep(3, settings(tmp_path / "run", pipeline=PipelineConfig(3)), model, DATA, work)
    assert len(said) == 3 and len(set(said)) == 1


def test_summary_and_records_tell_who_has_what(tmp_path: Path) -> None:
    runs = trained("two by two", tmp_path / "run")
    found = dict(summary.rows(runs[0]))["pipeline"]
    assert found == "1f1b, ranks 4 in 2 pipelines of 2: layer0..layer1 | layer2..layer3"
    lines = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    start = next(row for row in map(json.loads, lines) if row["event"] == "start")
    assert start["pipeline"] == {"order": "1f1b", "copies": [[0, 1], [2, 3]],
                                 "blocks": [["layer0..layer1", "layer2..layer3"]] * 2}
    assert summary.record(runs[0])["pipeline"] == start["pipeline"]
    (whole,) = trained("whole", tmp_path / "whole")
    assert "pipeline" not in dict(summary.rows(whole)) and summary.record(whole)["pipeline"] is None


# --- PyTorch -------------------------------------------------------------------------------------------------------

EVEN = samples(96), DATA[1]
"""BatchNorm takes no micro-batch of one sample."""

BATCHES = {"max_steps": STEPS, "global_batch": 24, "lr": 0.01, "optimizer": Named("Adam", {"eps": 1e-3})}


def torch_model(rank: int = 0) -> Any:
    """With what a checkpoint holds beside parameters: statistics of BatchNorm."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(3)
    nn = torch.nn
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 14), nn.Tanh(),
                         nn.Linear(14, CLASSES))


def torch_run(shape: str, out: Path, **changes: Any) -> list[Any]:
    size, keys = SHAPES[shape]
    if "pipeline" in keys:
        keys = {**keys, "pipeline": replace(keys["pipeline"], micro_batches=2)}
    return lockstep(size, settings(out, **{**BATCHES, **keys, **changes}), torch_model, EVEN, fitted)


def loaded(run: Any, path: Path) -> Any:
    """Return the run with a checkpoint's state."""
    session.restore(run, session.find(str(path), None, run.note) if run.control.rank == 0 else None)
    return run


def test_torch_pipeline_goes_on_bit_by_bit_and_in_any_shape(tmp_path: Path) -> None:
    shape = "two by two, zero"
    saved, at = CheckpointConfig(every_steps=HALF), tmp_path / "through" / "checkpoints" / f"step-{HALF:08d}"
    torch_run(shape, tmp_path / "through", checkpoint=saved)
    runs = torch_run(shape, tmp_path / "again", checkpoint=saved, resume=str(at))
    assert not any("anew" in note for note in runs[0].notes)
    assert apart(kept(tmp_path / "again", STEPS), kept(tmp_path / "through", STEPS)) == 0
    want = read_snapshot(at).tensors
    for other in ("whole", "one and two"):
        size, keys = SHAPES[other]
        if other == "one and two":  # by itself the second replica would have micro-batches of one sample
            keys = {"pipeline": PipelineConfig(depths=[1, 2], micro_batches=2)}
        runs = lockstep(size, settings(tmp_path / other, **BATCHES, **keys), torch_model, EVEN,
                        lambda run: loaded(run, at))
        found: set[tuple[str, str]] = set()
        for run in runs:
            for group, arrays in run.parts.state.state()[0].items():
                found |= {(group, name) for name in arrays}
                assert all((array == want[group][name]).all() for name, array in arrays.items())
        assert found == {(group, name) for group in ("model", "optimizer") for name in want[group]}


def test_torch_weights_of_a_pipeline_load_into_the_whole_model_and_its_own_rank_says_that_it_is_a_part(
        tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from safetensors.torch import load_file as load_tensors

    def work(run: Any) -> Any:
        fitted(run)
        trainer.export(run)
        with loop.joined(run):
            again = loop.measure(run, run.eval_feed)
        with pytest.raises(UserError, match="of which this rank of a pipeline has only some blocks"):
            run.spec.model(torch.zeros(2, FEATURES))
        assert any("model.pt is not written" in note for note in run.notes)
        return run.state.metrics, again

    results = lockstep(3, settings(tmp_path / "run", pipeline=PipelineConfig(3, micro_batches=2), **BATCHES),
                       torch_model,
                       EVEN, work)
    model = torch_model()
    model.load_state_dict(load_tensors(tmp_path / "run" / "model" / "model.safetensors"))
    model.eval()
    x, y = (torch.from_numpy(array) for array in DATA[1])
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(model(x), y))
    assert [metrics["loss"] for metrics, _ in results] == pytest.approx([loss] * 3, rel=1e-5)
    assert all(again == metrics for metrics, again in results)


def test_class_beyond_the_outputs_is_told_once_on_every_rank() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    said: list[str] = []
    x, y = DATA[0]
    beyond = np.where(np.arange(len(y)) == 40, 9, y)

    def work(control: Any, wire: Any) -> None:
        with pytest.raises(UserError, match="targets run from 0 to 9.*expected 0..4 for a model with 5") as error:
            assemble(config(global_batch=24, pipeline=PipelineConfig(depths=[1, 2])), torch_model(), (x, beyond),
                     control,
                     wire)
        said.append(str(error.value))

    LockstepWorld(3).run(work, timeout_s=30.0)
    assert len(said) == 3 and len(set(said)) == 1


# --- Keras on TensorFlow -------------------------------------------------------------------------------------------


def exported(run: Any) -> Any:
    trainer.export(run)
    return run


def keras_model(rank: int = 0) -> Any:
    """With what a checkpoint holds beside parameters: statistics of BatchNorm, the state of a dropout's generator."""
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(16, name="one"),
                             layers.BatchNormalization(name="normal"), layers.Dropout(0.2, name="drop"),
                             layers.Dense(CLASSES, name="two")], name="net")


@pytest.mark.slow
def test_keras_pipeline_goes_on_bit_by_bit_and_in_one_process(tmp_path: Path) -> None:
    keys = {"optimizer": Named("Adam", {"use_ema": True}), "max_steps": 4, "global_batch": 24}
    cut = {**keys, "pipeline": PipelineConfig(2, micro_batches=1), "checkpoint": CheckpointConfig(every_steps=2)}
    at = tmp_path / "through" / "checkpoints" / "step-00000002"
    runs = lockstep(2, settings(tmp_path / "through", **cut), keras_model, EVEN[0], lambda run: exported(fitted(run)))
    with pytest.raises(UserError, match="of which this rank of a pipeline has only some blocks"):
        runs[0].spec.model.call(EVEN[0][0])
    lockstep(2, settings(tmp_path / "again", **cut, resume=str(at)), keras_model, EVEN[0], fitted)
    assert apart(kept(tmp_path / "again", 4), kept(tmp_path / "through", 4)) == 0
    averages = {name: array for name, array in kept(tmp_path / "through", 4).tensors["optimizer"].items()
                if name.endswith("_average")}
    final = load_file(tmp_path / "through" / "model" / "model.safetensors")
    for name in ("one/kernel", "two/bias"):
        average = next(array for other, array in averages.items() if name.replace("/", "_") in other)
        assert (final[f"net/{name}"] == average).all(), "with use_ema the averaged weights are the result"
    (run,) = lockstep(1, settings(tmp_path / "whole", **keys), keras_model, EVEN[0], lambda run: loaded(run, at))
    want, groups = read_snapshot(at).tensors, run.parts.state.state()[0]
    for group in ("model", "optimizer"):
        assert list(groups[group]) == list(want[group])
        assert all((array == want[group][name]).all() for name, array in groups[group].items())
