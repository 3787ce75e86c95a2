"""`export`: each format loads without hvdtrain and gives the outputs of `predict`; mistakes are refused."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from small_runs import fitted, lockstep
from test_predict_command import kill, settings

from hvdtrain import Trainer
from hvdtrain.backends import exporting
from hvdtrain.commands import export, predict
from hvdtrain.config import DataParallelConfig, PipelineConfig
from hvdtrain.core.errors import UserError

LOADED = {
    "onnx": """
        import onnxruntime
        session = onnxruntime.InferenceSession("m.onnx")
        assert [(i.name, i.shape[1:]) for i in session.get_inputs()] == [("x", [12])], "inputs"
        check(session.run(["output"], {"x": x})[0])""",
    "torch": """
        import torch
        model = torch.export.load("m.pt2").module()
        check(model(torch.from_numpy(x)).detach().numpy())
        assert "tensorflow" not in sys.modules""",
    "saved_model": """
        import tensorflow as tf
        loaded = tf.saved_model.load("m")
        check(loaded.serve(x).numpy())""",
    "keras": """
        import keras
        check(keras.ops.convert_to_numpy(keras.models.load_model("m.keras")(x)))"""}
FUNCTIONAL = """
import keras

def build():
    x = keras.Input((12,))
    h = keras.layers.BatchNormalization()(keras.layers.Dense(16, "relu")(x))
    return keras.Model(x, keras.layers.Dense(5)(keras.layers.Dropout(0.5)(h)))
"""
CHECKED = """
        import sys
        import numpy as np
        x, want = np.load("data.npz")["x_test"], np.load("p.npz")["output"]
        def check(got):
            assert got.shape == want.shape and np.abs(got - want).max() < 1e-5, np.abs(got - want).max()
        {}
        assert "hvdtrain" not in sys.modules
"""


def written(folder, kind, *options):
    """Export the run in ``folder``."""
    assert export.main([str(folder / "run"), "--format", kind, *options,
                        "--out", str(folder / f"m{export.FORMATS[kind].ending}")]) == 0


def predicted(folder):
    (folder / "p.npz").unlink(missing_ok=True)
    assert predict.main([str(folder / "run"), "--out", str(folder / "p.npz")]) == 0


def load_without_hvdtrain(folder, kinds):
    """Load the files of ``kinds`` in a process of its own; their outputs have to be those in p.npz."""
    text = textwrap.dedent(CHECKED.format("".join(LOADED[kind] for kind in kinds)))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("finished")
    Trainer(settings(folder, "torch")).fit()
    return folder


@pytest.mark.slow
def test_a_pytorch_model_is_read_without_hvdtrain(finished, capfd):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    for kind in ("onnx", "torch"):
        written(finished, kind)
    told = capfd.readouterr().out
    assert "verified with ONNX Runtime: outputs of 5 samples and of 1 sample differ by at most" in told
    predicted(finished)
    load_without_hvdtrain(finished, ("onnx", "torch"))


@pytest.mark.slow
def test_a_keras_model_is_read_without_hvdtrain(tmp_path):
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    (tmp_path / "model.py").write_text(FUNCTIONAL)
    Trainer(settings(tmp_path, model=f"{tmp_path / 'model.py'}:build", model_args={})).fit()
    kill(tmp_path / "run")
    for kind in ("saved_model", "keras"):
        written(tmp_path, kind)
    predicted(tmp_path)
    load_without_hvdtrain(tmp_path, ("saved_model", "keras"))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"data_parallel": DataParallelConfig("zero", stage=2)},
                                     {"pipeline": PipelineConfig(stages=2)}, {"ema": 0.5}])
def test_a_run_of_two_ranks_exports_the_weights_that_predict_uses(tmp_path, changes):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    lockstep(2, settings(tmp_path, "torch", **changes), lambda rank: None, None, fitted)
    written(tmp_path, "torch")
    predicted(tmp_path)
    with np.load(tmp_path / "data.npz") as data, np.load(tmp_path / "p.npz") as outputs:
        got = torch.export.load(tmp_path / "m.pt2").module()(torch.from_numpy(data["x_test"]))
        assert np.allclose(got.detach().numpy(), outputs["output"], atol=1e-6)


MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.left, self.right = kind, torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)

    def forward(self, first, *, more, scale=1.0):
        out = self.left(first["left"]) + scale * self.right(more["right"])
        if self.kind == "branch" and out.sum() > 0:
            return -out
        if self.kind == "rows":
            return torch.stack([out[i] for i in range(len(out))])
        return {"logits": out, "more": (out * 2, None), "cache": object()}

def build(kind):
    return Net(kind)

def call(model, batch):
    return model({"left": batch[0][:, :6]}, more={"right": batch[0][:, 6:]}, scale=2.0)

def task(model, batch):
    found = call(model, batch)
    outputs = found["logits"] if isinstance(found, dict) else found
    return torch.nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])

def predict(model, batch):
    found = call(model, batch)
    return (found["logits"] if isinstance(found, dict) else found).argmax(1)
"""


def of_file(folder, kind):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (folder / "model.py").write_text(MODEL)
    Trainer(settings(folder, model=f"{folder / 'model.py'}:build", model_args={"kind": kind})).fit()


@pytest.mark.slow
def test_inputs_are_named_after_the_call_in_predict(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    of_file(tmp_path, "nested")
    written(tmp_path, "onnx", "--opset", "19", "--checkpoint", "2")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert [(one.name, one.shape) for one in session.get_inputs()] == [("first.left", ["batch", 6]),
                                                                       ("more.right", ["batch", 6])]
    assert [one.name for one in session.get_outputs()] == ["logits", "more.0"]
    predicted(tmp_path)
    x = np.load(tmp_path / "data.npz")["x_test"]
    logits = session.run(["logits"], {"first.left": x[:, :6], "more.right": x[:, 6:]})[0]
    assert predict.main([str(tmp_path / "run"), "--checkpoint", "2", "--out", str(tmp_path / "two.npz")]) == 0
    assert np.array_equal(logits.argmax(1), np.load(tmp_path / "two.npz")["output"])


@pytest.mark.slow
@pytest.mark.parametrize("kind, words", [("branch", r"branches on the values of its inputs.*model.py:11"),
                                         ("rows", "fixes the number of samples")])
def test_a_model_that_is_no_graph_is_refused_with_its_line(tmp_path, kind, words):
    of_file(tmp_path, kind)
    with pytest.raises(UserError, match=words):
        written(tmp_path, "torch")
    assert not list(tmp_path.glob("*m.pt2*"))


def test_a_wrong_export_is_an_error():
    want = {"a": np.ones((2, 3), np.float32), "b": np.array([np.inf, np.nan])}
    close = {**want, "a": want["a"] * (1 + 1e-6)}
    assert exporting.verified(close, want, "here") == pytest.approx(1e-6, rel=0.1)
    for wrong in ({**want, "a": want["a"] * 1.01}, {**want, "a": want["a"][:1]}, {"a": want["a"]},
                  {**want, "b": np.array([np.inf, 1])}):
        with pytest.raises(UserError, match="nothing was written"):
            exporting.verified(wrong, want, "here")


@pytest.mark.parametrize("options, words", [
    (["--format", "onnx", "--out", "m.pt"], "ends in .onnx"),
    (["--format", "keras", "--out", "m.keras"], "onnx or torch"),
    (["--format", "saved_model", "--out", "m"], "a model of torch"),
    (["--format", "torch", "--out", "run.pt2"], "exists")])
def test_mistakes_are_named_and_leave_no_file(finished, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.pt2").touch()
    with pytest.raises(UserError, match=words):
        export.main([str(finished / "run"), *options])
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt2"]
