"""`evaluate` and `predict`: weights of finished and killed runs, formats, refusals; files are whole or not there."""

import json
import shutil
import sys

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, HIDDEN, SLOW_TENSORFLOW, config, fitted, lockstep, samples

from hvdtrain import Trainer
from hvdtrain.checkpoint import CheckpointStore, Snapshot
from hvdtrain.commands import evaluate, predict
from hvdtrain.config import CheckpointConfig, DataConfig, DataParallelConfig, PipelineConfig
from hvdtrain.core.errors import UserError

MLP = {"in_features": FEATURES, "hidden": [HIDDEN], "classes": CLASSES, "activation": "tanh"}
NUMPY = {"model": "hvdtrain.backends.numpy.model:Model", "model_args": {"sizes": [FEATURES, HIDDEN, CLASSES]}}
MODELS = {"numpy": NUMPY, "torch": {"model": "torch_models.mlp:build", "model_args": MLP},
          "tensorflow": {"model": "tf_models.mlp:build", "model_args": MLP}}


def settings(folder, framework="numpy", **changes):
    """Return the configuration of a run in ``folder``/run on the file data.npz there; 3 steps of 8 samples."""
    x, y = samples(24)
    test = samples(21, seed=1)
    np.savez(folder / "data.npz", x=x, y=y, x_test=test[0], y_test=test[1])
    np.savez(folder / "new.npz", x=test[0])
    return config(**{"out": str(folder / "run"), "max_steps": 3, "global_batch": 8, **MODELS[framework],
                     "data": DataConfig(name=str(folder / "data.npz"), prefetch=0, workers=0),
                     "checkpoint": CheckpointConfig(every_steps=2, keep=5), **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    Trainer(settings(folder)).fit()
    return folder


def kill(run):
    """Leave what a run that was killed after its last checkpoint leaves."""
    (run / "completed.json").unlink()
    shutil.rmtree(run / "model")


def metrics(folder, *options):
    assert evaluate.main([str(folder / "run"), *options, "--out", str(folder / "m.json")]) == 0
    found = json.loads((folder / "m.json").read_text())
    (folder / "m.json").unlink()
    return found


def outputs(folder, *options):
    assert predict.main([str(folder / "run"), *options, "--out", str(folder / "p.npz")]) == 0
    with np.load(folder / "p.npz") as file:
        found = dict(file)
    (folder / "p.npz").unlink()
    return found


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_a_finished_and_a_killed_run_in_each_framework(tmp_path, framework):
    pytest.importorskip(framework)
    trainer = Trainer(settings(tmp_path, framework))
    trainer.fit()
    expected, own = trainer.evaluate(), trainer.predict(samples(21, seed=1)[0])
    found = metrics(tmp_path)
    assert found["metrics"] == expected and (found["step"], found["samples"], found["split"]) == (3, 21, "test")
    batch = ("--batch", "4", "--data", str(tmp_path / "new.npz"))  # without targets, none held out
    got = outputs(tmp_path, *batch)
    assert list(got) == ["output"] and got["output"].dtype == np.float32 and own.shape == (21, CLASSES)
    assert np.allclose(got["output"], own, atol=1e-6)
    kill(tmp_path / "run")
    assert metrics(tmp_path)["weights"] == "step-00000003" and metrics(tmp_path)["metrics"] == expected
    assert np.array_equal(outputs(tmp_path, *batch)["output"], got["output"])
    other = metrics(tmp_path, "--checkpoint", "2")
    assert other["step"] == 2 and other["metrics"] != expected


@pytest.mark.parametrize("changes", [{"data_parallel": DataParallelConfig("zero")},
                                     {"pipeline": PipelineConfig(stages=2)},
                                     {"checkpoint": CheckpointConfig(every_steps=2, layout="sharded")}])
def test_checkpoints_of_divided_models_load_whole(tmp_path, changes):
    made = settings(tmp_path, **changes)
    expected = lockstep(2, made, lambda rank: None, None, lambda run: fitted(run).state.metrics)[0]
    (tmp_path / "run" / "completed.json").unlink(missing_ok=True)
    assert metrics(tmp_path)["metrics"] == pytest.approx(expected)


def test_a_killed_run_with_a_moving_average_is_evaluated_by_it(tmp_path):
    trainer = Trainer(settings(tmp_path, "torch", ema=0.5))
    trainer.fit()
    expected = trainer.evaluate()
    kill(tmp_path / "run")
    assert metrics(tmp_path)["metrics"] == pytest.approx(expected)


def test_formats_hold_the_same_outputs(finished, tmp_path, monkeypatch):
    want = outputs(finished)["output"]
    assert predict.main([str(finished / "run"), "--out", str(tmp_path / "p.jsonl")]) == 0
    rows = [json.loads(line)["output"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert np.array_equal(np.array(rows), want)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"hvdtrain\[parquet\]"):
        predict.check_format("p.parquet")


def test_parquet_columns_are_lists_of_fixed_size(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    file = predict.OutputFile(str(tmp_path / "p.parquet"))
    parts = [np.arange(12.0).reshape(2, 3, 2), np.arange(6.0).reshape(1, 3, 2)]
    for part in parts:
        file.write({"a": part, "b": part[:, 0, 0]})
    file.finish()
    table = parquet.read_table(tmp_path / "p.parquet")
    assert table["a"].to_pylist() == np.concatenate(parts).tolist() and table["b"].to_pylist() == [0.0, 6.0, 0.0]


def test_the_best_checkpoint_is_the_one_that_the_newest_names(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", 9)
    for step, best in ((2, {"loss": [2]}), (4, {"loss": [3, 2]}), (6, {"loss": [3, 2], "accuracy": [6]})):
        store.save(Snapshot({"model": {}}, {"best": best}), step)
        if step == 4:  # the save of step 3 failed
            assert evaluate.best_step(store.root) == 2
    with pytest.raises(UserError, match="several checkpoints: step 2 by loss, step 6 by accuracy"):
        evaluate.best_step(store.root)


def test_what_fails_leaves_no_file(tmp_path):
    file = predict.OutputFile(str(tmp_path / "p.npz"))
    file.write({"a": np.zeros((2, 3))})
    with pytest.raises(UserError, match="float64\\[4\\] for a sample, and float64\\[3\\]"):
        file.write({"a": np.zeros((2, 4))})
    file.discard()
    file = predict.OutputFile(str(tmp_path / "p.jsonl"))
    with pytest.raises(UserError, match="the outputs cannot be written as .jsonl: Object of type complex"):
        file.write({"a": np.zeros(2, complex)})
    file.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options, words", [
    (["--checkpoint", "7"], "no checkpoint of step 7"), (["--checkpoint", "best"], "keeps no best checkpoint"),
    (["--checkpoint", "newest"], "--checkpoint is 'newest'"), (["--split", "all"], "has no split all"),
    (["--data", "nowhere.npz"], "no file"), (["--batch", "0"], "global_batch"), (["--dta", "x"], "no option --dta"),
    (["--model_args.sizes", "[12, 7, 5]"], "as in the model"), (["--out", "p.csv"], "ends in")])
def test_mistakes_are_named_and_leave_no_file(finished, tmp_path, options, words):
    run = finished / "run"
    out = [] if "--out" in options else ["--out", str(tmp_path / "p.npz")]
    with pytest.raises(UserError, match=words):
        predict.main([str(run), *out, *options])
    assert not list(tmp_path.glob("*p.*"))


def test_runs_whose_parts_a_script_gave_need_them_by_name(tmp_path):
    from small_runs import make_model

    Trainer(settings(tmp_path, model="auto", model_args={})).fit(make_model("numpy"))
    with pytest.raises(UserError, match="given to fit by a script"):
        metrics(tmp_path)
    assert metrics(tmp_path, "--model", NUMPY["model"], "--model_args.sizes", "[12, 16, 5]")["samples"] == 21
    with pytest.raises(UserError, match="comes before RUN"):
        evaluate.main(["--data", "digits", str(tmp_path / "run")])


def test_keys_of_reading_change_no_split_and_restored_weights_have_their_step(tmp_path):
    x, y = samples(24)
    np.savez(tmp_path / "held.npz", x=x, y=y)
    Trainer(settings(tmp_path, data=DataConfig(name=str(tmp_path / "held.npz"), prefetch=0, workers=0))).fit()
    completed = tmp_path / "run" / "completed.json"
    completed.write_text(json.dumps({**json.loads(completed.read_text()), "weights_at": 2}))
    found = metrics(tmp_path, "--data.prefetch", "1", "--data.shuffle", "false")
    assert (found["split"], found["step"]) == ("test", 2)
    assert metrics(tmp_path, "--data.args.test_fraction", "0.5")["split"] == "all"
