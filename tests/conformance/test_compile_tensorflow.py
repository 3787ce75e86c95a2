"""Keras on TensorFlow through XLA: the gradient up to rounding, for prepared sizes; and what XLA cannot compile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from small_runs import config, fitted, make_model, samples, solo

from hvdtrain.config import Config, Named

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

SETTINGS = config(global_batch=24, compile="auto")


def made(out, model=None, **changes):
    """Return a run that has joined its model, and what compiles it."""
    run = solo(replace(SETTINGS, out=str(out), **changes), model or make_model("tensorflow"), samples(96))
    run.join()
    return run, run.parts.compile


def prepared(run, compile, batch):
    compile.use(("xla",))
    assert compile.prepare(lambda: run.parts.stage.trial(batch), math.inf) == ""


def test_it_computes_the_same_gradient_for_sizes_that_were_prepared(tmp_path):
    import numpy as np

    run, compile = made(tmp_path)
    stage, batch = run.parts.stage, tuple(array[:8] for array in samples(96))
    want = [g.numpy() for g in stage.alone(batch)]
    assert compile.refusal("xla") == "" and compile.describe() == {"compile": "nothing"}
    prepared(run, compile, batch)
    assert compile.describe() == {"compile": "xla"} and compile.compiles(8) and not compile.compiles(9)
    for got, expected in zip(stage.alone(batch), want, strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)
    compile.use(())
    assert all((got.numpy() == expected).all() for got, expected in zip(stage.alone(batch), want))
    compile.use(("xla",))
    compiled = stage._gradients._xla
    assert compiled._jit_compile
    stage.alone(tuple(array[:9] for array in samples(96)))  # as it was written
    traced = compiled.experimental_get_tracing_count()
    stage.begin()
    run.dp.begin(0)
    stage.run(batch, 1.0, True, run.dp)
    assert compiled.experimental_get_tracing_count() == traced == 1  # one function serves training, too


def test_what_xla_cannot_compile_is_told(tmp_path):
    from fragile_keras import Faults, model

    run, compile = made(tmp_path / "drawn", model(Faults()))
    assert "dropout masks" in compile.refusal("xla")
    run, compile = made(tmp_path / "nodes", model(Faults(), exact=True))
    assert compile.refusal("xla") == ""
    with pytest.raises(Exception, match="PyFunc"):
        prepared(run, compile, tuple(array[:8] for array in samples(96)))


@pytest.mark.parametrize("changes, said", [({"balance": "auto"}, "balance: auto"), ({"sync_batchnorm": True}, ""),
                                           ({"remat": "every:1"}, "remat")], ids=str)
def test_what_does_not_go_together_is_left_with_its_reason(changes, said, tmp_path):
    run, compile = made(tmp_path, **changes)
    assert said in compile.refusal("xla") and bool(said) == bool(compile.refusal("xla"))


def test_metrics_of_training_batches_are_left_out_with_a_note(tmp_path, monkeypatch):
    """XLA's code is made before the metrics are there: it would leave them at their start, which is no number."""
    import keras

    from hvdtrain.engine.keras_bridge import Bridge
    from hvdtrain.planning import compile_choice as choice

    monkeypatch.setattr(choice, "MARGIN", -1000.0)  # kept however slow
    model = make_model("tensorflow")
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"])
    run = solo(replace(SETTINGS, optimizer=Named("auto"), max_steps=2, out=str(tmp_path)), model, samples(48))
    run.callbacks.append(Bridge([], run))
    fitted(run)
    assert run.parts.compile.chosen == ("xla",)
    assert set(run.callbacks[-1].history) == {"loss"} and any("batches are not computed" in n for n in run.notes)


def test_nothing_of_it_is_there_unless_it_is_asked_for(tmp_path):
    assert Config().compile == "off"
    assert solo(replace(SETTINGS, compile="off", out=str(tmp_path)), make_model("tensorflow"),
                samples(96)).parts.compile is None
