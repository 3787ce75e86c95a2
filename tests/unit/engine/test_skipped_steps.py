"""A step without an update is in no average, no log and no metric: nothing to read, not finite, an overflow in fp16."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, apart, config, fitted, make_model, samples, solo, weights

from hvdtrain.config import CheckpointConfig
from hvdtrain.data.sources import Unreadable
from hvdtrain.engine.average import averaged
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.history import History
from hvdtrain.trainer import Trainer

X, Y = samples(35)
BATCH, STEPS = 8, 5
BASE = config(global_batch=BATCH, epochs=1, ema=0.5, log_every=1, eval_every=0)
BASE = replace(BASE, data=replace(BASE.data, shuffle=False))
KINDS = {"unread": {"on_bad_sample": "skip"}, "not finite": {"nan_guard": "skip"},
         "overflow": {"precision": "fp16", "loss_scale": 2.0**19}}


class Unread:
    """Samples of which those of the last batch, which has three, cannot be read."""

    def __len__(self):
        return len(X)

    def fetch(self, numbers):
        for number in numbers:
            if number // BATCH == 4:
                raise Unreadable(int(number), f"file-{number}", "made up")
        return X[numbers], Y[numbers]


class Seen(Callback):
    """Keeps of every step whether it made its update, its loss, the weights and their average."""

    where = "all"

    def __init__(self):
        self.rows = []
        self.sizes = []

    def losses(self):
        """Loss and number of samples of each step that was made."""
        return np.array([(loss, n) for (updated, loss, *_), n in zip(self.rows, self.sizes) if updated])

    def step_end(self, run):
        with averaged(run.average):
            average = [array.copy() for array in weights(run)]
        self.sizes.append(run.batch.n_global)
        self.rows.append((run.updated, run.state.loss, [array.copy() for array in weights(run)], average))


def data_of(kind):
    if kind == "unread":
        return Unread()
    x = X.copy()
    x[2 * BATCH] = np.nan if kind == "not finite" else x[2 * BATCH]
    return x, Y


@pytest.mark.slow
@pytest.mark.parametrize("framework, kind", [("numpy", "unread"), ("numpy", "not finite"), *(
    (framework, kind) for framework in ("torch", "tensorflow") for kind in KINDS)])
def test_nothing_is_averaged_or_logged_of_it(framework, kind, tmp_path):
    run = solo(replace(BASE, out=str(tmp_path), **KINDS[kind]), make_model(framework), data_of(kind))
    run.callbacks[-2:-2] = [history := History(), seen := Seen()]
    fitted(run)
    run.records.close(run)
    made = [updated for updated, *_ in seen.rows]
    assert len(made) == STEPS and 0 < made.count(False) < STEPS
    assert not made[{"unread": 4, "not finite": 2, "overflow": 0}[kind]]
    for (updated, loss, mine, average), before in zip(seen.rows[1:], seen.rows):
        assert updated == (not math.isnan(loss))
        assert updated or apart(mine, before[2]) == apart(average, before[3]) == 0.0
    losses, n = seen.losses().T
    assert history.history["loss"] == [pytest.approx(losses @ n / n.sum())]
    assert run.state.outcome.last_loss == losses[-1]
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = [(row["step"], row["loss"]) for row in steps if row["event"] == "step"]
    assert logged == [(number, loss) for number, (updated, loss, *_) in enumerate(seen.rows, 1) if updated]


def test_a_loss_that_arrives_a_step_late_counts_for_its_own_step(tmp_path):
    """As on a GPU; what is known of a step there is its gradient, at once."""
    exact = solo(replace(BASE, nan_guard="skip", out=str(tmp_path / "a")), make_model("numpy"), data_of("not finite"))
    exact.callbacks.append(seen := Seen())
    fitted(exact)
    late = solo(replace(BASE, nan_guard="skip", out=str(tmp_path / "b")), make_model("numpy"), data_of("not finite"))
    late.parts.stage.asynchronous = True
    late.callbacks.append(history := History())
    fitted(late)
    losses, n = seen.losses()[:-1].T  # the last step's is never read
    assert history.history["loss"] == [pytest.approx(losses @ n / n.sum())]


def test_compiled_metrics_and_keras_logs_leave_it_out(tmp_path, monkeypatch, capsys):
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    monkeypatch.chdir(tmp_path)
    x = X.copy()
    x[0] = np.nan  # the first batch: there is no mean before it
    logs = []

    def fitted_with(x, y, **changes):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, activation="softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, found: logs.append(dict(found)))
        settings = replace(BASE, optimizer=replace(BASE.optimizer, name="auto"), metrics=[], ema=0.0,
                           checkpoint=CheckpointConfig(every="off", at_end=False), **changes)
        return Trainer(settings).fit(model, (x, y), callbacks=[watch, keras.callbacks.TerminateOnNaN()]).history

    found = fitted_with(x, Y, nan_guard="skip", out="a", on_oom="stop")
    assert logs[0] == {} and all(math.isfinite(one["loss"]) for one in logs[1:]) and len(logs) == STEPS
    note = "note: TerminateOnNaN with nan_guard: skip has no effect"
    assert note in capsys.readouterr().out
    wanted = fitted_with(X[BATCH:], Y[BATCH:], out="b")
    assert note not in capsys.readouterr().out
    assert found == {name: [pytest.approx(values[0], rel=1e-6)] for name, values in wanted.items()}
