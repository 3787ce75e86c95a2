"""Functions of a model file that count: those of the named file, and none that only happen to be there."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from small_runs import config, make_model, samples, solo

from hvdtrain.backends.model_spec import build_spec, spec_of
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import CheckpointConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.assemble import assemble

MAKER = """
from hvdtrain.backends.numpy.model import Model
def make(): return Model()
"""


def spec(tmp_path, monkeypatch, text, name):
    (tmp_path / "maker_of_models.py").write_text(MAKER)
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return build_spec(f"{name}:make", {}, prepare=lambda: None)


def test_a_task_beside_an_imported_builder_counts(tmp_path, monkeypatch):
    text = "from maker_of_models import make\ndef task(model, batch): return 0.0, 1\n"
    assert spec(tmp_path, monkeypatch, text, "imported_builder").task is not None


def test_a_task_beside_a_partial_counts(tmp_path, monkeypatch):
    text = ("import functools, maker_of_models\nmake = functools.partial(maker_of_models.make)\n"
            "def task(model, batch): return 0.0, 1\n")
    assert spec(tmp_path, monkeypatch, text, "partial_builder").task is not None


def test_a_function_called_weight_without_a_task_is_something_else(tmp_path, monkeypatch):
    text = "from maker_of_models import make\ndef weight(kilograms): return 1000.0\n"
    assert spec(tmp_path, monkeypatch, text, "scales").weight is None


def test_a_model_object_has_the_functions_of_its_class_file():
    assert spec_of(make_model("numpy")).task is None


def test_ranks_with_unlike_arrays_are_refused():
    def rank(control, wire):
        assemble(config(), make_model("numpy"), samples(16, seed=control.rank), control, wire)

    with pytest.raises(UserError, match="ranks hold different samples"):
        LockstepWorld(2).run(rank, timeout_s=30.0)


def test_max_steps_holds_for_a_run_that_is_resumed(tmp_path):
    settings = config(max_steps=3, out=str(tmp_path), checkpoint=CheckpointConfig(at_end=True))
    first = solo(settings, make_model("numpy"), samples(40))
    loop.fit(first)
    again = solo(replace(settings, resume="auto"), make_model("numpy"), samples(40))
    loop.fit(again)
    assert (first.state.cursor.step, again.state.cursor.step, again.timeline.totals.steps) == (3, 3, 0)


def test_a_model_that_is_not_finite_is_not_exported(tmp_path):
    from hvdtrain.trainer import export

    run = solo(config(max_steps=1, out=str(tmp_path)), make_model("numpy"), samples(40))
    loop.fit(run)
    run.parts.model.params["w0"][0, 0] = float("nan")
    with pytest.raises(UserError, match="parameter w0 is not finite"):
        export(run)
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_bfloat16_weights_are_looked_at_too():
    from hvdtrain.checkpoint.weights import check_finite

    one, inf, nan = np.array([0x3F80], np.uint16), np.array([0x7F80], np.uint16), np.array([0xFFC1], np.uint16)
    check_finite({"w#bfloat16": one, "i": inf}, ["w", "i"])  # plain uint16 is just a number
    for bad in (inf, nan):
        with pytest.raises(UserError, match="w#bfloat16 is not finite"):
            check_finite({"w#bfloat16": bad}, ["w"])
    check_finite({"mask#bfloat16": inf, "mask": np.array([np.inf])}, ["w"])
    for bad in ({"mask#bfloat16": nan}, {"mask": np.array([np.nan])}):
        with pytest.raises(UserError, match="mask.* is not finite"):
            check_finite(bad, ["w"])


def test_a_builders_own_error_keeps_its_traceback(tmp_path, monkeypatch):
    text = "def make(width=4):\n    raise ValueError('my own bug')\n"
    with pytest.raises(ValueError, match="my own bug"):
        spec(tmp_path, monkeypatch, text, "buggy_builder")


def test_a_ready_made_model_is_taken_as_it_is(tmp_path, monkeypatch):
    made = spec(tmp_path, monkeypatch, "from hvdtrain.backends.numpy.model import Model\n"
                "class Net(Model):\n    def __call__(self, x): return x\nmake = Net()\n", "ready_made")
    assert made.model is sys.modules["ready_made"].make


def test_a_trainers_own_arguments_are_refused_in_words():
    from hvdtrain import Trainer

    with pytest.raises(UserError, match="did you mean 'epochs'"):
        Trainer(epoch=3)
    with pytest.raises(UserError, match="Trainer got a dict"):
        Trainer({"epochs": 3})
