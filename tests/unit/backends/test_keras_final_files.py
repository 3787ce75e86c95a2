"""Parts of a Keras model that it cannot write are reported before the first step, and never cost the weights."""

import os

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="Keras is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from safetensors.numpy import load_file  # noqa: E402
from small_runs import CLASSES, FEATURES, config, samples  # noqa: E402

from hvdtrain.backends.keras import saving  # noqa: E402
from hvdtrain.trainer import Trainer  # noqa: E402


class Undescribed(keras.layers.Dense):
    """Cannot be described, by an error that Keras does not expect."""

    def get_config(self):
        raise AttributeError("no such thing")


class Unstored(keras.layers.Dense):
    """Cannot write its variables."""

    def save_own_variables(self, store):
        raise RuntimeError("not stored")


def model_of(layer):
    model = keras.Sequential([keras.Input((FEATURES,)), layer(CLASSES)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("layer, words, names", [
    (keras.layers.Dense, "", ["model.keras"]),
    (Undescribed, "model.keras will not be written, only model.weights.h5: AttributeError: no such thing",
     ["model.weights.h5"]),
    (Unstored, "model.keras and model.weights.h5 will not be written: RuntimeError: not stored", [])])
def test_what_keras_cannot_write_is_told_first_and_left_out(tmp_path, capsys, layer, words, names):
    model, before = model_of(layer), os.umask(0o027)
    (tmp_path / "run/model").mkdir(parents=True)
    try:
        trainer = Trainer(config(out=str(tmp_path / "run"), global_batch=8, max_steps=2))
        trainer.fit(model, samples(16))
    finally:
        os.umask(before)
    assert [note for note in trainer.run.notes if note.startswith("model.keras")] == [
        note for note in [saving.left_out(model)] if note]
    assert saving.left_out(model).startswith(words) and bool(words) == bool(saving.left_out(model))
    written = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run/model").iterdir()}
    assert written == dict.fromkeys([*names, "model.safetensors", "weights.json"], 0o640)
    assert ("are not written: RuntimeError" in capsys.readouterr().out) == (layer is Unstored)
    found = load_file(tmp_path / "run/model/model.safetensors")
    assert [np.array_equal(found[v.path], v.numpy()) for v in model.weights] == [True, True]
    assert (tmp_path / "run/completed.json").exists()
