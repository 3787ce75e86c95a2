"""Named evaluation sets and evaluations within an epoch of a Keras model: metrics, logs and callbacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from test_keras_bridge import V, W, X, Y, made, settings  # noqa: E402

from hvdtrain import Trainer  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.engine import loop  # noqa: E402
from hvdtrain.engine.assemble import assemble  # noqa: E402


class Diary(keras.callbacks.Callback):
    """Keeps the logs of each epoch, and the numbers of calls for each evaluation."""

    def __init__(self):
        super().__init__()
        self.epochs, self.tests = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))

    def on_test_begin(self, logs=None):
        self.tests.append([])

    def on_test_batch_end(self, batch, logs=None):
        self.tests[-1].append(batch)

    def on_test_end(self, logs=None):
        self.tests[-1].append(sorted(logs))


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fitted(**changes):
    model, diary = made(), Diary()
    sets = {"wiki": (X[:5], Y[:5]), "half": ((X, Y), (V[:4], W[:4]))}
    stop = keras.callbacks.EarlyStopping(monitor="val_wiki/loss", mode="max", patience=1)
    result = Trainer(settings(3, **changes)).fit(model, ((X, Y), (V, W)), callbacks=[diary, stop], eval=sets)
    return result, diary, model


@pytest.mark.slow
def test_evaluations_within_an_epoch_leave_the_metrics_of_training_as_they_are():
    (plain, want, _), (often, got, model) = fitted(), fitted(eval_steps=1)
    assert all(often.history[name] == pytest.approx(values, rel=1e-6) for name, values in plain.history.items())
    assert often.history.keys() == plain.history.keys() and len(got.epochs) == len(want.epochs) == 2
    assert {"accuracy", "auc", "val_auc", "val_wiki/auc", "val_half/loss"} <= set(got.epochs[0])
    assert got.tests[0] == [0, 1, 2, 3, sorted(name.removeprefix("val_") for name in got.epochs[0] if "val_" in name)]
    assert len(want.tests) == 2 and len(got.tests) == 6, "three steps an epoch; EarlyStopping ends the second"
    wiki = model.evaluate(X[:5], Y[:5], verbose=0, return_dict=True)
    assert often.metrics["wiki/auc"] == pytest.approx(wiki["auc"], rel=1e-5)
    assert often.metrics["wiki/loss"] == pytest.approx(wiki["loss"], rel=1e-5)


@pytest.mark.slow
def test_compiled_metrics_of_each_set_are_exact_over_ranks():
    models = [made() for _ in range(2)]

    def work(control, wire):
        run = assemble(replace(settings(1), optimizer=replace(settings(1).optimizer, name="SGD"), shares=[1, 0]),
                       models[control.rank], ((X, Y), (V, W)), control, wire, eval_sets={"wiki": (X[:5], Y[:5])})
        with loop.joined(run):
            return loop.measure_all(run)

    ranks = LockstepWorld(2).run(work, timeout_s=60.0)
    want = models[0].evaluate(X[:5], Y[:5], verbose=0, return_dict=True)
    assert ranks[0] == ranks[1] and ranks[0]["wiki/auc"] == pytest.approx(want["auc"], rel=1e-5)
