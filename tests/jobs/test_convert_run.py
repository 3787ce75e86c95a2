"""A run begun in one framework continues in the other on the same curve: 20 + 20 steps against 40, whole runs.

Few processes: one of TensorFlow trains and reads its checkpoints, one of PyTorch writes and continues from them, one
conversion back goes by the command line, and TensorFlow continues from it.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest
from runner import run

STEPS, HALF = 40, 20
OPTIMIZERS = {"sgd": ("SGD", {"momentum": 0.9, "nesterov": True}, 0.02),
              "adam": ("Adam", {"beta_2": 0.99, "epsilon": 1e-10}, 0.01),
              "adamw": ("AdamW", {"weight_decay": 0.1}, 0.002)}
APART = {"sgd": (1e-5, 1e-5), "adam": (1e-5, 1e-5), "adamw": (1e-4, 2e-3)}
"""Of losses, and of weights as parts of the largest. The last has Keras' own epsilon, 1e-7, which counts more in Keras
than in PyTorch in the first updates (`hvdtrain.backends.interchange.rule`); that shows in weights with gradients about
as small."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "tensorflow")),
    reason="a conversion needs PyTorch and TensorFlow")]

COMMON = f"""
import json, sys
from pathlib import Path
import numpy as np
from hvdtrain import Config, Trainer
from hvdtrain.config import CheckpointConfig, DataConfig, Named
from hvdtrain.commands import train
from hvdtrain.commands.convert import worker
from hvdtrain.commands.convert.request import Request, source_of, target_of
OPTIMIZERS, STEPS, HALF = {OPTIMIZERS!r}, {STEPS}, {HALF}

def data():
    draw = np.random.default_rng(3)
    x = draw.standard_normal((96, 8)).astype("float32")
    return x, (x @ draw.standard_normal((8, 4))).argmax(1)

def begin(out, step):
    return out / "checkpoints" / f"step-{{step:08d}}"

def go_on(out):
    Trainer(train.parse(["--config", str(out / "config.yaml")], env={{}})).fit()
"""

FIRST = COMMON + """
if __name__ == "__main__":
    top = Path(sys.argv[1])
    for name, (optimizer, args, lr) in OPTIMIZERS.items():
        out = top / f"tf-{name}"
        config = Config(model="tf_models.mlp:build", model_args={"in_features": 8, "hidden": [16], "classes": 4},
                        data=DataConfig(name=f"{__file__}:data", prefetch=0), global_batch=32, epochs=1000,
                        max_steps=STEPS,
                        optimizer=Named(optimizer, args), lr=lr, eval_every=0, log_every=1, progress="off",
                        checkpoint=CheckpointConfig(every_steps=HALF, keep=9), out=str(out))
        trainer = Trainer(config)
        trainer.save()
        trainer.fit()
        for step in (0, HALF):
            request = Request(source_of(str(begin(out, step)), print), target_of(str(top / f"torch-{name}-{step}")),
                              "tf_models.mlp:build", "torch_models.mlp:build", config.model_args, config.model_args,
                              input_shape=[8])
            request.write(top / f"{name}-{step}.json")
            worker.read(request, top / f"{name}-{step}.exchange")
"""
SECOND = COMMON + """
if __name__ == "__main__":
    top = Path(sys.argv[1])
    for name in OPTIMIZERS:
        for step in (0, HALF):
            request, out = Request.read(top / f"{name}-{step}.json"), top / f"torch-{name}-{step}"
            out.mkdir()
            report = worker.write(request, top / f"{name}-{step}.exchange", out)
            assert report["step"] == step and report["apart"] <= 1e-5, report
            go_on(out)
    assert "tensorflow" not in sys.modules
"""
LAST = COMMON + """
if __name__ == "__main__":
    go_on(Path(sys.argv[1]))
    assert "torch" not in sys.modules
"""


def child(tmp_path, name, text, *args):
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    good(run([sys.executable, str(script), *map(str, args)], 90))


def good(job):
    assert job.returncode == 0, job.text
    assert not job.orphans
    return job.stdout


def curve(out):
    """Loss by step."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line and "step" in line}


def weights(out):
    from safetensors.numpy import load_file

    return load_file(str(out / "model" / "model.safetensors"))


def same_curve(got, want, rtol):
    got, want = curve(got), curve(want)
    steps = sorted(set(got) & set(want))
    assert len(steps) >= HALF and steps[-1] == STEPS
    np.testing.assert_allclose([got[s] for s in steps], [want[s] for s in steps], rtol=rtol)


def same_weights(got, want, tolerance):
    got, want = weights(got), weights(want)
    assert sorted(got) == sorted(want)
    for name in want:
        apart = np.abs(got[name] - want[name]).max() / np.abs(want[name]).max()
        assert apart <= tolerance, f"{name}: {apart:.1e}"


def test_a_run_goes_on_in_the_other_framework_on_the_same_curve(tmp_path):
    child(tmp_path, "first", FIRST, tmp_path)
    child(tmp_path, "second", SECOND, tmp_path)
    for name in OPTIMIZERS:
        want, got = tmp_path / f"torch-{name}-0", tmp_path / f"torch-{name}-{HALF}"
        assert min(curve(want)) == 1 and min(curve(got)) == HALF + 1
        assert curve(want)[STEPS] < 0.8 * curve(want)[1], "nothing was learned"
        same_curve(got, want, APART[name][0])
        same_weights(got, want, APART[name][1])
        same_curve(tmp_path / f"tf-{name}", want, APART[name][0])
    back = tmp_path / "back"
    told = good(run([sys.executable, "-m", "hvdtrain", "convert", str(tmp_path / "torch-sgd-0" / "checkpoints" /
                     f"step-{HALF:08d}"), str(back), "--input_shape", "8"], 120))
    assert f"at step {HALF}" in told and f"train --config {back}/config.yaml" in told, told
    child(tmp_path, "last", LAST, back)
    same_curve(back, tmp_path / "tf-sgd", 1e-5)
    same_weights(back, tmp_path / "tf-sgd", 1e-5)
    assert not list(tmp_path.glob(".hvdtrain-convert-*"))
